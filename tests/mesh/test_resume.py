"""A frontend is killed under running streams, and every client gets the rest of its own from the other one."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.in_time import eventually, still
from tests.mesh.running_mesh import RunningMesh
from tests.resuming_client import ResumingClient

STREAMS = 8
MODEL = "demo-small"
RESPONSES = "/v1/responses"
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


def first_frontend(mesh: RunningMesh) -> int:
    """Process id of the frontend at the mesh's own port, once it serves: a test before this one may have killed it."""

    def serving() -> list[int]:
        pids = [
            int(role["attributes"]["pid"])
            for role in mesh.status()["roles"]
            if role["role"] == "frontend" and role["attributes"]["http_address"].endswith(f":{mesh.port}")
        ]
        # A killed one is announced until its lease is over.
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()] if answers() else []

    def answers() -> bool:
        try:
            return httpx.get(f"{mesh.url}/v1/models", timeout=10).status_code == 200
        except httpx.ConnectError:
            return False

    (pid,) = eventually(serving, 60, "it serves")
    return int(pid)


def test_a_killed_frontends_streams_go_on_at_the_other_one(pair: RunningMesh) -> None:
    asyncio.run(_killed_midway(pair, first_frontend(pair)))


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


def test_what_a_killed_frontend_made_in_the_background_is_made_by_the_other_one(pair: RunningMesh) -> None:
    pid = first_frontend(pair)
    url, other_url = (f"http://127.0.0.1:{pair.port + number}" for number in range(2))
    body = {"model": MODEL, "input": "a tale", "max_output_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=url, timeout=30) as first, httpx.Client(base_url=other_url, timeout=30) as second:
        truth = text_of(second.post(RESPONSES, json=body).json())
        with pair.held():
            made = [first.post(RESPONSES, json={**body, "background": True}).json()["id"] for _ in range(STREAMS)]
            seen: list[str] = []
            with first.stream("POST", RESPONSES, json={**body, "background": True, "stream": True}) as stream:
                for line in stream.iter_lines():
                    seen += [line] if line.startswith("data: ") else []
                    if len(seen) == 20:
                        break
            os.kill(pid, signal.SIGKILL)
        events = [json.loads(line.removeprefix("data: ")) for line in seen]
        made.append(events[0]["response"]["id"])

        def states() -> list[Any]:
            """Of those of them that the other frontend knows by now: the lost one has to leave first."""
            found = [second.get(f"{RESPONSES}/{response_id}") for response_id in made]
            return [answer.json() for answer in found if answer.status_code == 200]

        def ended() -> list[Any]:
            return [each for each in states() if each["status"] not in ("queued", "in_progress")]

        eventually(lambda: len(ended()) == len(made), 60, lambda: f"all of them end: {states()}")
        assert {(each["status"], text_of(each)) for each in ended()} == {("incomplete", truth)}
        behind = f"{RESPONSES}/{made[-1]}?stream=true&starting_after={events[-1]['sequence_number']}"
        answer = second.get(behind)
        still(
            answer.status_code == 200, f"the workers still have the stream of a frontend that is missed: {answer.text}"
        )
        rest = answer.text.splitlines()
        events += [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == truth


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
