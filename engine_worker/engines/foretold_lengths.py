"""What an engine tells that knows how long its requests will get."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class ForetoldLength:
    """Of one decoding request."""

    request_id: str
    generated_tokens: int
    remaining_tokens: int
    """Spoilt by the error model."""


@runtime_checkable
class ForetellsLengths(Protocol):
    """An engine that needs no predictor."""

    def foretell_lengths(self, every_steps: int) -> bool:
        """Tell at every `every_steps`-th step from now on, 0: never. False if it was set up not to."""

    def foretold_lengths(self) -> AsyncIterator[tuple[ForetoldLength, ...]]:
        """All decoding requests, each time; has one consumer. One that lags gets the newest only."""


def foretells_lengths(engine: Engine) -> TypeGuard[ForetellsLengths]:
    """Whether the engine is such a one."""
    return isinstance(engine, ForetellsLengths)
