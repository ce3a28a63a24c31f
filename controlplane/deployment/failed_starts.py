"""When a replica that failed is tried again (pure)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from controlplane.deployment.steps import TierShape
from mesh.backoff import pause_after

FIRST_BACKOFF_S = 5.0
MAX_BACKOFF_S = 300.0
MAX_TRIES_AT_A_PRICE = 3
"""So often a serving instance is ended for a replica that then fails; more often only after another plan."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Of the replicas of one model and shape, since the plan came."""

    times: int
    last_s: float
    why: str

    @property
    def again_s(self) -> float:
        """From when on another try may be made."""
        return self.last_s + pause_after(self.times, FIRST_BACKOFF_S, MAX_BACKOFF_S)


class FailedStarts:
    """Failures of replicas that plans in force want: the pause doubles with each, up to five minutes."""

    def __init__(self) -> None:
        self._failures: dict[TierShape, Failure] = {}

    def note(self, key: TierShape, why: str, now_s: float) -> Failure:
        """Another one failed. Those that were started together and fail together count once."""
        former = self._failures.get(key)
        if former is not None and now_s < former.again_s:
            return former
        failure = self._failures[key] = Failure(former.times + 1 if former else 1, now_s, why)
        return failure

    def held(self, now_s: float) -> frozenset[TierShape]:
        """Not to be tried yet."""
        return frozenset(key for key, failure in self._failures.items() if now_s < failure.again_s)

    @property
    def spent(self) -> frozenset[TierShape]:
        """Not to be tried at the price of an instance that serves."""
        return frozenset(key for key, failure in self._failures.items() if failure.times >= MAX_TRIES_AT_A_PRICE)

    def forget(self, models: Collection[str]) -> None:
        """Another plan came for these: they are tried afresh."""
        self._failures = {key: failure for key, failure in self._failures.items() if key[0] not in models}

    def reasons(self) -> Mapping[TierShape, Failure]:
        """The failures since each model's plan came, by model and shape."""
        return self._failures
