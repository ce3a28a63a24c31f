"""The clients of a simulated mesh: each sends its request and writes down what came of it."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from engine_worker.settings import WorkerSettings
from fault_simulation.client import ReceivedAnswer, ask, no_pause
from fault_simulation.machines import Life, everybodys_digest
from fault_simulation.nodes import HTTP_PORT, SimulatedMesh
from fault_simulation.oracle import ExpectedChoice, Oracle
from fault_simulation.timeline import ADAPTERS, CASCADE, LARGE, MODEL, Phase, Request, Timeline

_CHECKOUT: Final = Path(__file__).resolve().parents[1]
MODEL_PATH: Final = (Path() if Path.cwd() == _CHECKOUT else _CHECKOUT) / "demo/models/demo-small"
"""Workers announce it. From its checkout, `penstock fuzz` does the same wherever that lies."""
MODEL_TOKENS: Final = 2048
"""Its longest context."""
BOUNCE_TOKENS: Final = 16
"""Prompts are short."""
TRY_AGAIN_S: Final = 0.5
"""After every frontend has refused the connection."""
RETURNING: Final = "the client cut its connection, to come back"


MODEL_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    MODEL: (),
    # Other tokens, so that nobody takes an answer of one for that of the other, and slower.
    LARGE: ("instance.output.first_token_id=300", "cost.fixed_ms=8"),
}
"""Of the engines of each model's workers."""


def worker_settings(
    model: str, options: Sequence[str] = (), phase: Phase = "any", *, bounces: bool = False
) -> WorkerSettings:
    """Of a worker; `options` are of its engine, besides those of the model. `bounces`: it gives back what comes to a
    queue that is a little longer than was believed; otherwise nothing."""
    told = (*options, f"instance.max_model_len_tokens={MODEL_TOKENS}", *MODEL_OPTIONS[model])
    return WorkerSettings(
        model=model,
        model_path=str(MODEL_PATH),
        engine="simulated",
        engine_arg=told,
        phase=phase,
        bounce_tokens=BOUNCE_TOKENS if bounces else 0,
    )


@cache
def oracle(model: str) -> Oracle:
    """Knows the answers of a model."""
    return Oracle.of(worker_settings(model))


@dataclass(slots=True)
class Attempt:
    """One connection to one frontend."""

    frontend: str
    life: Life | None
    """The process that was there when it began."""
    began_s: float
    answer: ReceivedAnswer = field(default_factory=ReceivedAnswer)
    ended_s: float | None = None
    had: ReceivedAnswer | None = None
    """What came of the stream before, where this asks for the rest of one."""

    @property
    def is_refused(self) -> bool:
        """No connection came about."""
        return self.answer.status == 0 and self.answer.error == "connection refused"


@dataclass(slots=True)
class Asked:
    """A request and all that came of it."""

    request: Request
    expected: tuple[ExpectedChoice, ...]
    """Of a cascade: the answer of the first tier."""
    tiers: Mapping[str, tuple[ExpectedChoice, ...]] = field(default_factory=dict)
    """Of a cascade: the answers of all tiers, by model."""
    attempts: list[Attempt] = field(default_factory=list)
    has_left: bool = False
    """Its client hung up."""
    is_over: bool = False

    @property
    def name(self) -> str:
        """For people."""
        return f"request {self.request.number}"

    @property
    def models(self) -> tuple[str, ...]:
        """Who may answer it."""
        tiers = list(self.tiers) or [_engine_model(self.request)]
        max_tier = self.request.body.get("penstock", {}).get("max_tier")
        return tuple(tiers[: tiers.index(max_tier) + 1] if max_tier else tiers)

    def expected_as(self, answer: ReceivedAnswer) -> tuple[ExpectedChoice, ...]:
        """What the tier says that this answer is of. A part of an answer may not tell yet."""
        if not self.tiers:
            return self.expected
        if answer.tier:
            return self.tiers.get(answer.tier, ())
        text = answer.choices[0].text if answer.choices else ""
        return next((said for said in self.tiers.values() if said[0].text.startswith(text)), self.expected)


def adapter_path(name: str) -> str:
    """Where a LoRA adapter lies on every machine."""
    return f"/adapters/{name}"


def _engine_model(request: Request) -> str:
    """The model whose instances answer it."""
    asked = str(request.body["model"])
    return MODEL if asked in ADAPTERS else asked


def asked_of(request: Request) -> Asked:
    """A request and what it must be answered."""
    body = {name: value for name, value in request.body.items() if name != "penstock"}
    if body["model"] != CASCADE:
        model = _engine_model(request)
        digest = everybodys_digest(adapter_path(body["model"])) if body["model"] in ADAPTERS else ""
        return Asked(request, oracle(model).answer(request.path, {**body, "model": model}, digest))
    tiers = {model: oracle(model).answer(request.path, body) for model in (MODEL, LARGE)}
    return Asked(request, tiers[MODEL], tiers)


class Workload:
    """All clients. `on_end` hears of each attempt at the moment that it ends; `polls` is what a client does that asks
    for a response in the background."""

    def __init__(
        self,
        mesh: SimulatedMesh,
        timeline: Timeline,
        on_end: Callable[[Asked, Attempt], None],
        polls: Callable[[Asked, Sequence[str]], Coroutine[Any, Any, None]],
    ) -> None:
        self.asked: list[Asked] = []
        self._mesh = mesh
        self._frontends = timeline.topology.frontend_ids
        self._requests = timeline.requests
        self._on_end = on_end
        self._polls = polls
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Send every request at its time."""
        loop = self._mesh.loop
        for request in self._requests:
            asked = asked_of(request)
            self.asked.append(asked)
            loop.call_in_at(self._mesh.client, request.at_s, self._send, asked, self._frontends)

    def send_now(self, request: Request, frontend: str) -> Asked:
        """A request besides those of the timeline, to one frontend alone."""
        asked = asked_of(request)
        self._send(asked, (frontend,))
        return asked

    def end(self) -> None:
        """Every client leaves."""
        for task in self._tasks:
            task.cancel()

    def _send(self, asked: Asked, frontends: Sequence[str]) -> None:
        work = (self._polls if asked.request.behaviour == "polls" else self._ask)(asked, frontends)
        self._tasks.append(self._mesh.loop.spawn(self._mesh.client, work, f"client {asked.request.number}"))

    async def _ask(self, asked: Asked, frontends: Sequence[str]) -> None:
        """By one frontend after the other, for as long as nobody takes the connection."""
        turn, loop = asked.request.frontend % len(frontends), self._mesh.loop
        while not asked.is_over:
            name = frontends[turn % len(frontends)]
            attempt = Attempt(name, self._mesh.machines[name].life, loop.now_s, had=_stream_so_far(asked))
            if attempt.had is not None:
                attempt.answer = ReceivedAnswer(choices=attempt.had.choices, last_event_id=attempt.had.last_event_id)
            asked.attempts.append(attempt)
            await self._try(asked, attempt)
            attempt.ended_s = loop.now_s
            self._on_end(asked, attempt)
            asked.is_over = asked.has_left or not (attempt.is_refused or _returns(asked, attempt))
            turn += 1
            if attempt.answer.error == RETURNING:
                await asyncio.sleep(asked.request.for_s)
            elif not asked.is_over and turn % len(frontends) == asked.request.frontend % len(frontends):
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
        path, body, headers = _asks(request, attempt)
        work = ask(self._mesh.network, self._mesh.client, address, path, body, headers, attempt.answer, pause)
        if request.behaviour not in ("leaves", "returns") or attempt.had is not None:
            await work
            return
        reading = asyncio.ensure_future(work)
        await asyncio.wait((reading,), timeout=max(0.0, stalls_s - loop.now_s))
        if reading.done():
            return
        reading.cancel()
        await asyncio.wait((reading,))
        if request.behaviour == "leaves":
            asked.has_left = True
        else:
            attempt.answer.is_broken, attempt.answer.error = True, RETURNING


def _asks(request: Request, attempt: Attempt) -> tuple[str, dict[str, Any] | None, dict[str, str]]:
    """Path, body and headers."""
    if attempt.had is not None:
        last = attempt.had.last_event_id
        return f"/v1/requests/{attempt.had.request_id}/events", None, {"last-event-id": last} if last else {}
    headers = {"x-penstock-event-ids": "true"}
    return (
        request.path,
        request.body,
        headers | ({"x-penstock-resumable": "true"} if request.behaviour == "returns" else {}),
    )


def _stream_so_far(asked: Asked) -> ReceivedAnswer | None:
    """What a client that returns has; nothing while it was given no id to ask for."""
    if asked.request.behaviour != "returns":
        return None
    return next((each.answer for each in reversed(asked.attempts) if each.answer.request_id), None)


def _returns(asked: Asked, attempt: Attempt) -> bool:
    """Whether the client comes for the rest."""
    return attempt.answer.is_broken and _stream_so_far(asked) is not None
