"""Runs requests on an engine and gathers their hidden states with the lengths that came of them."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, StepOutput
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.vllm.engine import VllmEngine
from mesh.errors import EngineFailed
from services.predictor.dataset import CollectedRequest, DatasetDescription, DatasetFolder

LATE_S: Final = 10.0
"""How long states of a request that has ended are waited for; what comes later is missing, and counted. None is
dropped, so only steps whose rows the engine cannot tell apart are ever missing."""
_TICK_S: Final = 0.2


@dataclass(slots=True)
class CollectProgress:
    """Counts of a running collection, updated in place for the progress line."""

    requests: int
    samples: int = 0
    missing_samples: int = 0
    done: int = 0
    skipped: int = 0
    failed: int = 0
    cut: int = 0
    output_tokens: int = 0


@dataclass(slots=True)
class _Open:
    number: int
    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    ended_s: float = 0.0
    states: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def generated(self) -> int:
        return len(self.token_ids)


class Collector:
    """Keeps the engine's batch full and writes each part of the dataset once its requests have ended."""

    def __init__(
        self,
        engine: VllmEngine,
        folder: DatasetFolder,
        description: DatasetDescription,
        prompts: list[tuple[int, ...]],
        at_once: int,
        clock: Callable[[], float],
    ) -> None:
        """The engine is started; `at_once` requests run at a time."""
        self._engine = engine
        self._folder = folder
        self._description = description
        self._prompts = prompts
        self._at_once = at_once
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._ended: dict[int, list[CollectedRequest | None]] = {}
        self.progress = CollectProgress(requests=len(prompts))

    async def run(self, present_parts: frozenset[int]) -> None:
        """Collect the parts that are not there. Raises EngineFailed."""
        reason = await self._engine.capture_hidden_states(1, lossless=True)
        if reason:
            raise EngineFailed(f"the engine gives no hidden states: {reason}")
        waiting = self._waiting(present_parts)
        listening = asyncio.create_task(self._listen())
        output = asyncio.create_task(self._follow())
        try:
            while True:
                self._submit(waiting)
                if not self._open:
                    return
                await asyncio.wait((listening, output), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                for task in (listening, output):
                    if task.done():
                        task.result()
                        raise EngineFailed("the engine ended before all requests had been collected")
                self._close_late()
        finally:
            listening.cancel()
            output.cancel()
            await asyncio.gather(listening, output, return_exceptions=True)

    def _waiting(self, present_parts: frozenset[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        for number, prompt in enumerate(self._prompts):
            if number // self._description.part_requests in present_parts:
                self.progress.skipped += 1
            else:
                yield number, prompt

    def _submit(self, waiting: Iterator[tuple[int, tuple[int, ...]]]) -> None:
        running = sum(request.reason is None for request in self._open.values())
        while running < self._at_once and (upcoming := next(waiting, None)) is not None:
            number, prompt = upcoming
            request_id = f"collect-{number}"
            self._open[request_id] = _Open(number, prompt)
            sampling = SamplingParams(
                max_tokens=self._description.max_tokens, temperature=self._description.temperature
            )
            self._engine.submit(EngineRequest(request_id, prompt, sampling))
            running += 1
        self._refill = waiting

    async def _follow(self) -> None:
        async for step in self._engine.outputs():
            self._take_step(step)

    def _take_step(self, step: StepOutput) -> None:
        for delta in step.deltas:
            request = self._open.get(delta.request_id)
            if request is None:
                continue
            request.token_ids += delta.token_ids
            if delta.finish_reason is not None:
                request.reason, request.ended_s = delta.finish_reason, self._clock()
                self._close_if_complete(delta.request_id, request)
                self._submit(self._refill)

    async def _listen(self) -> None:
        async for batch in self._engine.hidden_states():
            self._take_states(batch)

    def _take_states(self, batch: HiddenStates) -> None:
        rows = np.frombuffer(batch.states, "<f4").reshape(len(batch.request_ids), batch.hidden_size)
        for request_id, context_tokens, row in zip(batch.request_ids, batch.context_tokens, rows, strict=True):
            request = self._open.get(request_id)
            if request is None:
                continue
            generated = context_tokens - len(request.prompt)
            if generated % self._description.every_tokens == 0:
                request.states[generated] = row.copy()
            if request.reason is not None:
                self._close_if_complete(request_id, request)

    def _expected(self, request: _Open) -> int:
        return -(-request.generated // self._description.every_tokens)

    def _close_if_complete(self, request_id: str, request: _Open) -> None:
        if len(request.states) >= self._expected(request):
            self._close(request_id, request)

    def _close_late(self) -> None:
        now_s = self._clock()
        for request_id, request in list(self._open.items()):
            if request.reason is not None and now_s - request.ended_s > LATE_S:
                self._close(request_id, request)

    def _close(self, request_id: str, request: _Open) -> None:
        del self._open[request_id]
        progress = self.progress
        progress.done += 1
        kept = None
        if request.reason in (FinishReason.STOP, FinishReason.LENGTH) and request.states:
            generated = tuple(sorted(request.states))
            was_cut = request.reason is FinishReason.LENGTH
            states = np.stack([request.states[count] for count in generated])
            kept = CollectedRequest(request.prompt, tuple(request.token_ids), was_cut, generated, states)
            progress.samples += len(generated)
            progress.missing_samples += self._expected(request) - len(generated)
            progress.output_tokens += request.generated
            progress.cut += was_cut
        else:
            progress.failed += 1
        self._file(request.number, kept)

    def _file(self, number: int, request: CollectedRequest | None) -> None:
        part_requests = self._description.part_requests
        part = number // part_requests
        ended = self._ended.setdefault(part, [])
        ended.append(request)
        if len(ended) == min(part_requests, len(self._prompts) - part * part_requests):
            kept = [request for request in self._ended.pop(part) if request is not None]
            if kept:
                self._folder.write_part(part, kept)
