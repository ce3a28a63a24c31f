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


PROBABILITY = 95.0
"""With which a quality is promised unless somebody says otherwise, in per cent."""


def quality_refusal(judge: str, is_labelled: bool) -> str:
    """Why no goal can be planned for by these scores; empty if one can.

    A model's confidence is not its quality: demo models that are right 49, 75 and 94 % of the time are 92, 97 and 99 %
    sure, and a plan that takes the one for the other has the smallest answer everything.
    """
    if is_labelled or judge != "confidence":
        return ""
    return (
        "confidence says how sure a model is of its answer and not how good that is, so no quality can be planned for "
        "by it alone. Have samples labelled: by a strong judge or a checker (penstock cascade set --label model:NAME, "
        "endpoint:MODEL@URL or exact) or by people (penstock plan cascade --labels FILE); confidence goes on deciding "
        "who answers. Or choose another judge (--judge)"
    )


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
    probability: float = PROBABILITY
    """In per cent: with which the quality is to be held. 0: just reach it on the sample."""
    judge_gpu_s: float = 0.0
    """GPU time of a judgement, for a judge that takes its GPUs from `gpus` too."""

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
        if not 0 <= self.probability < 100:
            raise ConfigurationError(
                f"the goal of {self.cascade}: a probability is 0 (none) to below 100 per cent, got {self.probability:g}"
            )
        if not 0 <= self.judge_gpu_s < inf:
            raise ConfigurationError(f"the goal of {self.cascade}: judge_gpu_s is a time, got {self.judge_gpu_s:g}")
        return self
