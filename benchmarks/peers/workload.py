"""What is asked of every router, and the client that asks it."""

import asyncio
import json
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final

from benchmarks import english
from mesh.errors import PeerUnavailable
from services.cli.replay.completions import request_head
from services.cli.replay.pool import ConnectionPool, parse_endpoint

MODEL: Final = "bench"
FASTEST_MS: Final = 0.01
_EVENT: Final = b"data: {"


@dataclass(frozen=True, slots=True)
class Workload:
    """Chats of one kind. Where they are streamed what is counted is chunks, otherwise requests."""

    name: str
    characters: int
    shared_characters: int
    answer_tokens: int
    at_once: int
    requests: int
    """In a round."""
    step_ms: float = FASTEST_MS
    """How long engines take for a token."""
    is_streamed: bool = False

    def bodies(self, seed: int) -> Iterator[bytes]:
        """Endless requests, in English that nobody has sent before but for what they share with all of any seed."""
        shared, rng = english.text(self.shared_characters, random.Random(0)), random.Random(seed)
        while True:
            text = shared + english.text(self.characters - self.shared_characters, rng)
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": self.answer_tokens}
            yield json.dumps({**body, "ignore_eos": True, "stream": self.is_streamed}).encode()


WORKLOADS: Final = (
    Workload("1k characters, 1 token", 1024, 512, 1, 8, 160),
    Workload("1k characters, 16 tokens", 1024, 512, 16, 32, 128),
    Workload("32k characters, 31k shared", 32768, 31744, 1, 8, 40),
    Workload("32k characters, fresh text", 32768, 0, 1, 8, 24),
    Workload("a streamed chunk, 32 x 100/s", 1024, 512, 60, 32, 32, step_ms=10.0, is_streamed=True),
)


@dataclass(frozen=True, slots=True)
class Answered:
    """What one round came to."""

    units: int
    """Chunks or requests."""
    ttft_ms: float
    """The median; of an answer that is not streamed, until it is whole."""


class _Reader:
    """Counts the events of one answer. Raises PeerUnavailable where it is an error."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self.ttft_s = 0.0
        self.events = 0

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        if status != 200:
            raise PeerUnavailable(f"a router answered {status}")

    def on_body(self, chunk: bytes) -> None:
        self.ttft_s = self.ttft_s or asyncio.get_running_loop().time() - self._sent_s
        self.events += chunk.count(_EVENT)


async def ask(url: str, workload: Workload, seed: int, requests: int) -> Answered:
    """So many requests, a new one whenever another is answered. Raises PeerUnavailable."""
    endpoint = parse_endpoint(url)
    pool = ConnectionPool(endpoint)
    bodies = list(islice(workload.bodies(seed), requests))
    left, readers = iter(bodies), []

    async def one_after_another() -> None:
        for body in left:
            reader = _Reader(asyncio.get_running_loop().time())
            await pool.exchange(request_head(endpoint, "POST", "/v1/chat/completions", "", len(body)) + body, reader)
            readers.append(reader)

    async with asyncio.timeout(300), asyncio.TaskGroup() as tasks:
        for _ in range(workload.at_once):
            tasks.create_task(one_after_another())
    pool.close()
    units = sum(reader.events for reader in readers) if workload.is_streamed else len(readers)
    return Answered(units, 1e3 * statistics.median(reader.ttft_s for reader in readers))
