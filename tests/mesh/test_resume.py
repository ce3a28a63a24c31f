"""A frontend is killed under running streams, and every client gets the rest of its own from the other one."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.in_time import still
from tests.mesh.running_mesh import RunningMesh
from tests.resuming_client import ResumingClient

STREAMS = 8
MODEL = "demo-small"
TOKENS = 200
TRIES = 5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    options = ("--engine", "simulated", "--model", MODEL, "--workers", "3", "--frontends", "2")
    for attempt in range(TRIES):
        run_dir: Path = tmp_path_factory.mktemp("pair")
        running = RunningMesh(run_dir, *options)
        try:
            running.wait_until_serving()
            break
        except AssertionError:  # the port after a free one may be taken
            running.cut()
            if attempt == TRIES - 1:
                raise
    yield running
    running.stop()
    running.cut()


def clients() -> list[ResumingClient]:
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    choices = ({}, {"n": 2, "seed": 7})
    return [
        ResumingClient({**body, **choices[number % 2], "prompt": f"tale {number}"}, "/v1/completions")
        for number in range(STREAMS)
    ]


def test_a_killed_frontends_streams_go_on_at_the_other_one(pair: RunningMesh) -> None:
    (pid,) = (
        int(role["attributes"]["pid"])
        for role in pair.status()["roles"]
        if role["role"] == "frontend" and role["attributes"]["http_address"].endswith(f":{pair.port}")
    )
    asyncio.run(_killed_midway(pair, pid))


async def _killed_midway(mesh: RunningMesh, pid: int) -> None:
    """`pid`: of the frontend at the mesh's own port."""
    urls = [f"http://127.0.0.1:{mesh.port + number}" for number in range(2)]
    async with (
        httpx.AsyncClient(base_url=urls[0], timeout=30) as first,
        httpx.AsyncClient(base_url=urls[1], timeout=30) as second,
    ):
        undisturbed = clients()
        await asyncio.gather(*(client.ask(second) for client in undisturbed))

        disturbed = clients()
        with mesh.held():
            asking = [asyncio.create_task(client.ask(first)) for client in disturbed]
            async with asyncio.timeout(20):
                while not all(len(client.event_ids) > 20 for client in disturbed):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*asking)
        cut = [client for client in disturbed if not client.is_done]
        still(len(cut) == STREAMS, "all of them are under way")
        await asyncio.gather(*(client.resume(second) for client in cut))
    assert [client.answer for client in disturbed] == [client.answer for client in undisturbed]
