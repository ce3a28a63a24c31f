"""Durations of an engine's steps, for profiles to fit step costs to: each watcher has a bounded queue of its own."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from controlplane.model.step_sample import StepSample
from engine_worker.engines.interface import Engine
from mesh.errors import RequestRefused


@runtime_checkable
class StepSource(Protocol):
    """An engine whose steps can be watched."""

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """Call `observe` after each step from now on; None: no more. While nobody watches it costs nothing."""


def has_steps(engine: Engine) -> TypeGuard[StepSource]:
    return isinstance(engine, StepSource)


MOST_WATCHERS = 4
MOST_SAMPLES = 4096


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Samples of the steps since the watcher last looked."""

    samples: tuple[StepSample, ...]
    lost: int
    """Steps between these and the ones before that the watcher was too slow for."""


class StepWatch:
    """The bounded queue of one watcher: a watcher that lags loses the oldest samples, and is told how many."""

    def __init__(self) -> None:
        self._samples: deque[StepSample] = deque(maxlen=MOST_SAMPLES)
        self._lost = 0
        self._changed = asyncio.Event()

    def add(self, sample: StepSample) -> None:
        """Queue the sample of a finished step."""
        self._lost += len(self._samples) == MOST_SAMPLES
        self._samples.append(sample)
        self._changed.set()

    async def take(self) -> StepBatch:
        """Wait for a step, then give all there are."""
        await self._changed.wait()
        self._changed.clear()
        batch = StepBatch(tuple(self._samples), self._lost)
        self._samples.clear()
        self._lost = 0
        return batch


class StepWatches:
    """All watchers of one engine; without any, the engine tells nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watches: list[StepWatch] = []
        self._observers: list[Callable[[StepSample], None]] = []

    def observe_always(self, observe: Callable[[StepSample], None]) -> None:
        """Call `observe` after each step from now on, for the engine's life, if it tells of its steps."""
        if has_steps(self._engine):
            self._observers.append(observe)
            self._engine.watch_steps(self._observe)

    @contextmanager
    def watch(self) -> Iterator[StepWatch]:
        """Watch until the end of the block. Raises `RequestRefused` where there are too many watchers, or the engine
        does not tell of its steps."""
        if not has_steps(self._engine):
            raise RequestRefused("the engine of this worker does not tell of its steps")
        if len(self._watches) >= MOST_WATCHERS:
            raise RequestRefused(f"{MOST_WATCHERS} others watch this engine's steps; try again when one has ended")
        watch = StepWatch()
        self._watches.append(watch)
        self._engine.watch_steps(self._observe)
        try:
            yield watch
        finally:
            self._watches.remove(watch)
            if not self._watches and not self._observers:
                self._engine.watch_steps(None)

    def _observe(self, sample: StepSample) -> None:
        for observe in self._observers:
            observe(sample)
        for watch in self._watches:
            watch.add(sample)
