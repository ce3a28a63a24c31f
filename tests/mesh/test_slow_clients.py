"""Two thousand clients that send a byte a second: what they cost, and what others notice of them."""

import asyncio
import statistics
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from mesh.open_files import allow_open_files
from tests.in_time import within
from tests.mesh.running_mesh import RunningMesh

pytestmark = [pytest.mark.process, pytest.mark.slow]

SLOW_HEADS = SLOW_BODIES = 1000
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
REQUESTS = 40
MAX_GROWTH_BYTES = 96 * 1024 * 1024
HEADER_TIMEOUT_S = 10.0
"""The default."""
BODY = {"model": "demo-small", "prompt": "Count from 7 up to 12.", "max_tokens": 4}


class Slow:
    """Sends one byte a second until it is closed."""

    def __init__(self, first: bytes) -> None:
        self.first = first
        self.is_open = False
        self.answer = b""

    async def run(self, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        self.is_open = True
        trickling = asyncio.create_task(self._trickle(writer))
        try:
            while piece := await reader.read(4096):  # not all at once, which is lost with the connection
                self.answer += piece
        except ConnectionError:
            pass  # cut off: what it has heard is its answer
        finally:
            self.is_open = False
            trickling.cancel()
            writer.close()

    async def _trickle(self, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(self.first)
            while True:
                await asyncio.sleep(1)
                writer.write(b"x")
                await writer.drain()


def resident_bytes(pid: int) -> int:
    (line,) = (each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


async def latencies_ms(url: str) -> list[float]:
    taken = []
    async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False) as client:
        for _ in range(REQUESTS):
            began_s = time.monotonic()
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.status_code == 200
            taken.append(1000 * (time.monotonic() - began_s))
    return taken


async def test_two_thousand_slow_clients_cost_little_and_others_are_served(tmp_path: Path) -> None:
    assert allow_open_files(SLOW_HEADS + SLOW_BODIES + 100) > SLOW_HEADS + SLOW_BODIES, "for this side of them"
    mesh = RunningMesh(tmp_path, "--engine", "simulated", "--model", "demo-small:1")
    try:
        await asyncio.to_thread(mesh.wait_until_serving)
        pid = await asyncio.to_thread(mesh.pid, "frontend")
        before_ms = await latencies_ms(mesh.url)
        before_bytes = resident_bytes(pid)
        heads = [Slow(HEAD + b"x-slow: ") for _ in range(SLOW_HEADS)]
        bodies = [Slow(HEAD + b"content-length: 100000\r\n\r\n{") for _ in range(SLOW_BODIES)]
        began_s = time.monotonic()
        running = [asyncio.create_task(each.run(mesh.port)) for each in (*heads, *bodies)]
        async with asyncio.timeout(HEADER_TIMEOUT_S):
            while not all(each.is_open for each in (*heads, *bodies)):  # noqa: ASYNC110 - sockets tell nothing
                await asyncio.sleep(0.05)
        during_ms = await latencies_ms(mesh.url)
        held_bytes = resident_bytes(pid) - before_bytes
        async with asyncio.timeout(3 * HEADER_TIMEOUT_S):
            while any(each.is_open for each in heads):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        closed_s = time.monotonic() - began_s
        # The connection of one whose next byte came behind the answer may have been reset before it read that.
        answers = [each.answer for each in heads if each.answer]
        assert len(answers) > SLOW_HEADS / 2
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        assert sum(each.is_open for each in bodies) == SLOW_BODIES, "a body is given more time"
        after_ms = await latencies_ms(mesh.url)
        figures = [f"{statistics.median(each):.0f} ms" for each in (before_ms, during_ms, after_ms)]
        print(
            f"{SLOW_HEADS + SLOW_BODIES} slow clients hold {held_bytes / 2**20:.0f} MiB; heads closed after "
            f"{closed_s:.1f} s; median request before, during and after: {', '.join(figures)}"
        )
        assert held_bytes < MAX_GROWTH_BYTES
        within(max(during_ms) / 1000, 5, "others are served meanwhile")
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert await asyncio.to_thread(mesh.stop) == 0
    finally:
        mesh.cut()
