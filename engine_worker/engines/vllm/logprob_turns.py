"""Keeps requests apart whose logprobs vLLM would mix up.

vLLM's first model runner, that of CPUs and of what its second one lacks, gives all requests of a batch the logprobs of
named tokens once one of them has `logprob_token_ids` (`vllm/v1/sample/sampler.py` of 0.32). In such an engine, requests
that name tokens and requests that want the chosen token's rivals take turns, first come, first served. All others run
beside both: the chosen token's own logprob is always right.

To ask for the logprobs of the whole vocabulary and pick from them was rejected: vLLM keeps those of every token until
the request ends, a gigabyte for a hundred tokens.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import Enum, auto

from controlplane.model.request import SamplingParams
from engine_worker.engines.vllm.running import EngineRequestState


class _Kind(Enum):
    """Which logprobs a request wants. One kind runs at a time."""

    NAMED = auto()
    RIVALS = auto()


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    running: EngineRequestState
    kind: _Kind
    admitted: asyncio.Future[None]


class LogprobTurns:
    """The turns of one engine."""

    def __init__(self, *, is_needed: bool) -> None:
        self._is_needed = is_needed
        self._running: Counter[_Kind] = Counter()
        self._waiting: deque[_Waiting] = deque()

    @asynccontextmanager
    async def turn(self, running: EngineRequestState) -> AsyncIterator[None]:
        """Wait until the request may be in a batch with those that run; it runs until this is left. One that was taken
        back will never be in a batch, and passes."""
        kind = _kind(running.request.sampling) if self._is_needed and not running.is_aborted else None
        if kind is None:
            yield
            return
        await self._enter(running, kind)
        try:
            yield
        finally:
            self._leave(kind)

    def aborted(self, running: EngineRequestState) -> None:
        """The request was taken back: if it waits, it passes."""
        for waiting in [each for each in self._waiting if each.running is running]:
            self._waiting.remove(waiting)
            self._admit(waiting)
        self._go_on()

    def validate(self) -> None:
        """Raises AssertionError if somebody waits who could run."""
        assert all(running >= 0 for running in self._running.values()), "a request has left twice"
        assert not self._waiting or not self._may_run(self._waiting[0].kind), "the next one waits for nobody"

    async def _enter(self, running: EngineRequestState, kind: _Kind) -> None:
        waiting = _Waiting(running, kind, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._go_on()
        try:
            await waiting.admitted
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._go_on()
            else:
                self._leave(kind)
            raise

    def _leave(self, kind: _Kind) -> None:
        self._running[kind] -= 1
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._may_run(self._waiting[0].kind):
            self._admit(self._waiting.popleft())

    def _admit(self, waiting: _Waiting) -> None:
        self._running[waiting.kind] += 1
        if not waiting.admitted.done():
            waiting.admitted.set_result(None)

    def _may_run(self, kind: _Kind) -> bool:
        return not any(running for each, running in self._running.items() if each is not kind)


def _kind(sampling: SamplingParams) -> _Kind | None:
    if sampling.logprob_token_ids:
        return _Kind.NAMED
    return _Kind.RIVALS if sampling.logprobs else None
