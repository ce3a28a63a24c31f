"""The requests of a disturbed mesh: so many long streams at a time, and new ones at a steady rate."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from mesh.tasks import TaskSet
from services.cli.chaos.streams import Client, Question, Stream
from services.cli.chaos.verdict import Tally

PAUSE_S = 0.1
"""After a failure, before a stream is asked for again."""


@dataclass(frozen=True, slots=True)
class Load:
    """The questions that are asked while the mesh is broken, and how fast."""

    streams: tuple[Question, ...]
    """All at the same time, each again when it has ended."""
    new: tuple[Question, ...]
    """In turn, whether or not earlier ones have ended."""
    rate: float
    """New ones a second; 0: none."""
    deadline_s: float
    """Deadline of each request."""
    fresh_every: int = 0
    """After so many requests prompts are asked under another cache salt, so that nobody has their KV; 0: never."""


class Traffic:
    """Runs a load and tallies its answers."""

    def __init__(self, client: Client, load: Load) -> None:
        self.streams, self.new = Tally(), Tally()
        self._client = client
        self._load = load
        self._clock = asyncio.get_running_loop().time
        self._stream_tasks: list[asyncio.Task[None]] = []
        self._running: dict[int, Stream] = {}
        self._ended_chunks = self._asked = 0
        self._streams_close = self._new_close = False
        self._asking: set[asyncio.Task[None]] = set()
        """Arrivals and new requests."""
        self._tasks = TaskSet("traffic")

    def start_streams(self) -> None:
        """Start all streams at once; each is repeated when it ends."""
        streams = (self._repeat(number, question) for number, question in enumerate(self._load.streams))
        self._stream_tasks = [self._tasks.spawn(lane, name=f"lane {number}") for number, lane in enumerate(streams)]

    def start_new(self) -> None:
        """Have new requests come from now on."""
        if self._load.rate > 0:
            self._spawn_asking(self._arrivals(), "arrivals")

    @property
    def chunks(self) -> int:
        """Chunks that all streams have brought so far, finished ones included."""
        return self._ended_chunks + sum(stream.chunks for stream in self._running.values())

    async def end_streams(self) -> None:
        """Begin none again, and return when those that run have ended."""
        self._streams_close = True
        if self._stream_tasks:
            await asyncio.wait(self._stream_tasks)

    async def end_new(self) -> None:
        """Have no more come, and return when everything has ended."""
        self._new_close = True
        while self._asking:
            await asyncio.wait(self._asking)

    async def cancel(self) -> None:
        """Give up what still runs."""
        await self._tasks.cancel()

    async def _repeat(self, number: int, question: Question) -> None:
        while True:
            failed = self.streams.failed
            await self._ask(f"stream {number}", question, self.streams, self._running, number)
            if self._streams_close:
                return
            if self.streams.failed > failed:
                await asyncio.sleep(PAUSE_S)

    async def _arrivals(self) -> None:
        """Open loop: a slow answer makes nobody wait with the next question."""
        begin_s, number = self._clock(), 0
        while not self._new_close:
            question = self._load.new[number % len(self._load.new)]
            name = f"new request {number}"
            self._spawn_asking(self._ask(name, question, self.new, {}, number), name)
            number += 1
            await asyncio.sleep(begin_s + number / self._load.rate - self._clock())

    def _spawn_asking(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._tasks.spawn(work, name=name)
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)

    async def _ask(self, name: str, question: Question, tally: Tally, running: dict[int, Stream], number: int) -> None:
        stream = running[number] = Stream(self._clock)
        fresh_every = self._load.fresh_every
        salt = f"chaos {self._asked // fresh_every}" if fresh_every else ""
        self._asked += 1
        await self._client.ask(question.request.encoded(salt), stream, self._load.deadline_s)
        del running[number]
        if tally is self.streams:
            self._ended_chunks += stream.chunks
        tally.add(name, stream.answer(), question.expected, question.schema)


def sum_of_chunks(questions: Sequence[Question]) -> int:
    """Chunks of all undisturbed answers together."""
    return sum(question.expected.chunks for question in questions)
