"""What an engine tells that knows how long its requests will get."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class PredictedLength:
    """Of one decoding request."""

    request_id: str
    generated_tokens: int
    remaining_tokens: int
    """Spoilt by the error model."""


@runtime_checkable
class LengthPredictingEngine(Protocol):
    """An engine that needs no predictor."""

    def enable_length_predictions(self, every_steps: int) -> bool:
        """Tell at every `every_steps`-th step from now on, 0: never. False if it was set up not to."""

    def length_predictions(self) -> AsyncIterator[tuple[PredictedLength, ...]]:
        """All decoding requests, each time; has one consumer. One that lags gets the newest only."""


def predicts_lengths(engine: Engine) -> TypeGuard[LengthPredictingEngine]:
    """Whether the engine is such a one."""
    return isinstance(engine, LengthPredictingEngine)
