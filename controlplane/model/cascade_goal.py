"""What a cascade's plans are to reach: a record in the state store that the planner follows."""

from math import inf
from typing import Literal

import msgspec

from mesh.errors import ConfigurationError

GOALS_PREFIX = "/penstock/goals/cascade/"
"""Followed by the cascade's name."""
PLANS_PREFIX = "/penstock/plans/cascade/"
"""Where the plan in force of each cascade stands."""

Minimise = Literal["slowest_tier", "end_to_end"]
"""What a plan's latency is: p95 of its slowest tier (Cascadia, section 3.2), or the mean time of a request over all
tiers that it passes, with their judgements."""


def judgement_s(judge: str) -> float:
    """What a judgement is taken to take where nobody says: nothing by what is computed at once, a second by a model, or
    where the judge is not known ("")."""
    return 0.0 if judge in ("confidence", "exact") else 1.0


class CascadeGoal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A quality to reach as fast as possible, or a latency to answer within as well as possible."""

    cascade: str
    gpus: int
    tiers: tuple[str, ...]
    """MODEL@DEVICE[:DTYPE] of the catalogue, or profile:KEY[,KEY...] for a measured one; one for each tier."""
    quality: float | None = None
    latency_s: float | None = None
    """The latency to answer within, of the kind that `minimise` names."""
    judge_s: float | None = None
    """What a judgement takes; None: as the cascade's first judge does (`judgement_s`)."""
    replan: bool = True
    """Plan anew when the workload has moved; otherwise only at the first workload."""
    minimise: Minimise = "slowest_tier"

    @property
    def key(self) -> str:
        """The goal's key in the state store."""
        return GOALS_PREFIX + self.cascade

    def checked(self) -> "CascadeGoal":
        """Itself. Raises `ConfigurationError` for what no plan can be made for."""
        if not self.cascade or "/" in self.cascade:
            raise ConfigurationError(f"a goal needs the name of a cascade, got {self.cascade!r}")
        if self.gpus < 1 or not self.tiers or not 0 <= (self.judge_s or 0.0) < inf:
            raise ConfigurationError(f"the goal of {self.cascade} needs gpus >= 1, a tier at least and judge_s >= 0")
        if (self.quality is None) == (self.latency_s is None):
            raise ConfigurationError(f"the goal of {self.cascade} is either a quality or a latency")
        if self.quality is not None and not 0 <= self.quality <= 100:
            raise ConfigurationError(f"the goal of {self.cascade}: a quality goes from 0 to 100, got {self.quality:g}")
        if self.latency_s is not None and not 0 < self.latency_s < inf:
            raise ConfigurationError(f"the goal of {self.cascade}: a latency is above 0 s, got {self.latency_s:g}")
        return self
