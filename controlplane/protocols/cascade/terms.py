"""What holds for one request on its way up a cascade."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from controlplane.model.cascade_record import MAX_SCORE
from mesh.errors import ConfigurationError


class WithoutJudge(StrEnum):
    """What to do with an answer that nobody could judge."""

    ESCALATE = "escalate"
    """Let the next tier answer too; the last one's answer needs no judge. Keeps the quality, costs time."""
    ACCEPT = "accept"
    """Take it. Keeps the time, costs quality."""


@dataclass(frozen=True, slots=True)
class CascadeTerms:
    """Fixed when the request is admitted: a plan that changes on the way does not touch it."""

    thresholds: tuple[float, ...]
    """One fewer than tiers: an answer of tier i is accepted if it scores at least thresholds[i]."""
    expected_s: tuple[float, ...]
    """One per tier: what its answer is expected to take, judging included; 0 where nothing is known."""
    deadline_s: float | None = None
    """On the caller's clock: no tier is begun that is not expected to have answered by then."""
    max_tier: int | None = None
    """The last tier that may be asked, counted from 0; None: all."""
    without_judge: WithoutJudge = WithoutJudge.ESCALATE
    speculate_from: float = 0.0
    """The next tier is begun ahead once an answer will be escalated with at least this probability; 0: never."""

    def __post_init__(self) -> None:
        if len(self.expected_s) != self.tiers:
            raise ConfigurationError(f"{self.tiers} tiers need as many expected times, got {len(self.expected_s)}")
        if self.max_tier is not None and not 0 <= self.max_tier < self.tiers:
            raise ConfigurationError(
                f"the tier {self.max_tier} is none of this cascade's, which are 0 to {self.tiers - 1}"
            )
        if not all(threshold >= 0 for threshold in self.thresholds):
            raise ConfigurationError(f"thresholds are scores from 0 on, got {self.thresholds}")

    @property
    def tiers(self) -> int:
        """How many tiers the cascade has, those included that may not be asked."""
        return len(self.thresholds) + 1

    @property
    def last_tier(self) -> int:
        """The last one that may be asked."""
        return self.tiers - 1 if self.max_tier is None else self.max_tier

    @property
    def first_tier(self) -> int:
        """The first one that is asked."""
        return next(tier for tier in range(self.tiers) if self.accepts_some(tier))

    @property
    def reached(self) -> tuple[int, ...]:
        """Those that are asked as long as none fails: no tier above one that accepts everything, none that accepts
        nothing."""
        top = next(tier for tier in range(self.tiers) if self.accepts_all(tier))
        return tuple(tier for tier in range(top + 1) if self.accepts_some(tier))

    def accepts_some(self, tier: int) -> bool:
        """Whether any score would do; a tier that accepts none is not asked."""
        return tier == self.last_tier or self.thresholds[tier] <= MAX_SCORE

    def accepts_all(self, tier: int) -> bool:
        """Whether every score would do; such a tier's answer is not judged."""
        return tier == self.last_tier or self.thresholds[tier] <= 0


def thresholds_for(planned: Sequence[float], quality: float | None) -> tuple[float, ...]:
    """The thresholds in force, or, for a request that asks for a quality of its own, that score on every tier.

    Raises `ConfigurationError` for a quality that is no score.
    """
    if quality is None:
        return tuple(planned)
    if not 0 <= quality <= MAX_SCORE:
        raise ConfigurationError(f"a quality is a score from 0 to {MAX_SCORE:g}, got {quality:g}")
    return (quality,) * len(planned)
