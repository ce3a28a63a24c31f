"""The worker's side of pooling: prompts in, vectors out, as many at once as its settings allow."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from controlplane.model.pooling import MAX_POOLED_PROMPTS
from engine_worker.engines.pooling import PoolingEngine, PoolingParameters
from mesh.errors import QueueFull, RequestRefused


class PoolingQueue:
    """Prompts inside the engine: bounded, and waited for by a drain."""

    def __init__(self, engine: PoolingEngine, max_requests: int, is_draining: Callable[[], bool]) -> None:
        self._engine = engine
        self._max_requests = max_requests
        self._is_draining = is_draining
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def pool(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        parameters: PoolingParameters,
        priority: int,
        first_segments: Sequence[int] = (),
    ) -> list[NDArray[np.float32]]:
        """One result for each prompt, all or none. `first_segments`: `first_segment_tokens` of each, if any. Raises
        RequestRefused for what the model cannot do, `QueueFull` where another instance may take them, and
        EngineFailed."""
        if not 1 <= len(prompts) <= MAX_POOLED_PROMPTS:
            raise RequestRefused(f"{len(prompts)} prompts in one call; 1 to {MAX_POOLED_PROMPTS} are taken")
        if self._is_draining():
            raise QueueFull("the worker is draining")
        if self._running + len(prompts) > self._max_requests:
            raise QueueFull(f"{self._running} prompts are in the engine already")
        if first_segments and len(first_segments) != len(prompts):
            raise RequestRefused(f"{len(first_segments)} lengths of segments for {len(prompts)} prompts")
        of_prompts = [replace(parameters, first_segment_tokens=tokens) for tokens in first_segments]
        of_prompts = of_prompts or [parameters] * len(prompts)
        self._running += len(prompts)
        self._idle.clear()
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._engine.pool(f"{request_id}-{index}", token_ids, of_prompt, priority))
                    for index, (token_ids, of_prompt) in enumerate(zip(prompts, of_prompts, strict=True))
                ]
        except BaseExceptionGroup as errors:
            raise _first(errors) from errors
        finally:
            self._running -= len(prompts)
            if not self._running:
                self._idle.set()
        return [task.result() for task in tasks]

    async def drained(self) -> None:
        """Return once no prompt is in the engine."""
        await self._idle.wait()


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
