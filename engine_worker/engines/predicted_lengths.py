"""Length predictions that come from the engine itself: the simulated engine knows how long its requests will get."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeGuard, runtime_checkable

from engine_worker.engines.interface import Engine


@dataclass(frozen=True, slots=True)
class PredictedLength:
    """How many tokens one decoding request has generated, and how many it is predicted still to generate."""

    request_id: str
    generated_tokens: int
    remaining_tokens: int
    """Spoilt by the error model."""


@runtime_checkable
class LengthPredictingEngine(Protocol):
    """An engine that predicts the lengths of its requests, so that no length predictor is asked."""

    def enable_length_predictions(self, every_steps: int) -> bool:
        """Predict after every `every_steps`-th step from now on; 0 stops it. Returns False if the engine was set up not
        to."""

    def length_predictions(self) -> AsyncIterator[tuple[PredictedLength, ...]]:
        """Yields predictions for all decoding requests at once. One consumer only; one that lags gets the newest
        only."""


def predicts_lengths(engine: Engine) -> TypeGuard[LengthPredictingEngine]:
    return isinstance(engine, LengthPredictingEngine)
