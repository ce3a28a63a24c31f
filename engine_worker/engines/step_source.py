"""Durations of an engine's steps, from which profiles fit step costs."""

from collections.abc import Callable
from typing import Protocol, TypeGuard, runtime_checkable

from controlplane.model.step_sample import StepSample
from engine_worker.engines.interface import Engine


@runtime_checkable
class StepSource(Protocol):
    """An engine whose steps can be watched."""

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """Call `observe` after each step from now on; None: no more. While nobody watches it costs nothing."""


def has_steps(engine: Engine) -> TypeGuard[StepSource]:
    return isinstance(engine, StepSource)
