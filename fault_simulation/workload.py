"""The clients of a simulated mesh: each sends its request and writes down what came of it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final

from fault_simulation.client import ReceivedAnswer, ask, no_pause
from fault_simulation.nodes import HTTP_PORT, Life, SimulatedMesh
from fault_simulation.oracle import ExpectedChoice, Oracle
from fault_simulation.timeline import MODEL, Request, Timeline
from simulator.instance.config import InstanceConfig

MODEL_PATH: Final = Path(__file__).resolve().parents[1] / "demo/models/demo-small"
MODEL_TOKENS: Final = 2048
"""Its longest context."""
TRY_AGAIN_S: Final = 0.5
"""After every frontend has refused the connection."""


@lru_cache(maxsize=1)
def oracle() -> Oracle:
    """Of the model that all workers serve."""
    return Oracle(MODEL, MODEL_PATH, InstanceConfig(max_model_len_tokens=MODEL_TOKENS))


@dataclass(slots=True)
class Attempt:
    """One connection to one frontend."""

    frontend: str
    life: Life | None
    """The process that was there when it began."""
    began_s: float
    answer: ReceivedAnswer = field(default_factory=ReceivedAnswer)
    ended_s: float | None = None

    @property
    def is_refused(self) -> bool:
        """No connection came about."""
        return self.answer.status == 0 and self.answer.error == "connection refused"


@dataclass(slots=True)
class Asked:
    """A request and all that came of it."""

    request: Request
    expected: tuple[ExpectedChoice, ...]
    attempts: list[Attempt] = field(default_factory=list)
    has_left: bool = False
    """Its client hung up."""
    is_over: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"request {self.request.number}"


class Workload:
    """All clients. `on_end` hears of each attempt at the moment that it ends."""

    def __init__(self, mesh: SimulatedMesh, timeline: Timeline, on_end: Callable[[Asked, Attempt], None]) -> None:
        self.asked: list[Asked] = []
        self._mesh = mesh
        self._frontends = timeline.topology.frontend_ids
        self._requests = timeline.requests
        self._on_end = on_end
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Send every request at its time."""
        loop = self._mesh.loop
        for request in self._requests:
            asked = Asked(request, oracle().answer(request.path, request.body))
            self.asked.append(asked)
            loop.call_in_at(self._mesh.client, request.at_s, self._send, asked, self._frontends)

    def send_now(self, request: Request, frontend: str) -> Asked:
        """A request besides those of the timeline, to one frontend alone."""
        asked = Asked(request, oracle().answer(request.path, request.body))
        self._send(asked, (frontend,))
        return asked

    def end(self) -> None:
        """Every client leaves."""
        for task in self._tasks:
            task.cancel()

    def _send(self, asked: Asked, frontends: Sequence[str]) -> None:
        work = self._ask(asked, frontends)
        self._tasks.append(self._mesh.loop.spawn(self._mesh.client, work, f"client {asked.request.number}"))

    async def _ask(self, asked: Asked, frontends: Sequence[str]) -> None:
        """By one frontend after the other, for as long as nobody takes the connection."""
        turn, loop = asked.request.frontend % len(frontends), self._mesh.loop
        while not asked.is_over:
            name = frontends[turn % len(frontends)]
            attempt = Attempt(name, self._mesh.machines[name].life, loop.now_s)
            asked.attempts.append(attempt)
            await self._try(asked, attempt)
            attempt.ended_s = loop.now_s
            self._on_end(asked, attempt)
            asked.is_over = asked.has_left or not attempt.is_refused
            turn += 1
            if not asked.is_over and turn % len(frontends) == asked.request.frontend % len(frontends):
                await asyncio.sleep(TRY_AGAIN_S)

    async def _try(self, asked: Asked, attempt: Attempt) -> None:
        request, loop = asked.request, self._mesh.loop
        stalls_s = asked.attempts[0].began_s + request.after_s
        address = f"{attempt.frontend}:{HTTP_PORT}"

        async def stall() -> None:
            left_s = request.for_s - (loop.now_s - stalls_s)
            if loop.now_s >= stalls_s and left_s > 0:
                await asyncio.sleep(left_s)

        pause = stall if request.behaviour == "stalls" else no_pause
        work = ask(
            self._mesh.network, self._mesh.client, address, request.path, request.body, {}, attempt.answer, pause
        )
        if request.behaviour != "leaves":
            await work
            return
        reading = asyncio.ensure_future(work)
        await asyncio.wait((reading,), timeout=max(0.0, stalls_s - loop.now_s))
        if not reading.done():
            asked.has_left = True
            reading.cancel()
            await asyncio.wait((reading,))
