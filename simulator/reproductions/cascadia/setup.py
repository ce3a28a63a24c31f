"""Models, devices and sizes of runs."""

from dataclasses import dataclass

from controlplane.planning.cascade.replica import ReplicaShape
from simulator.cascade.tier import ReplicaModel, Tier, TierModel

GPUS = 32
"""Four servers of eight (section 4.1)."""
JUDGE_S = 1.0
"""A judgement takes 1 to 2 s (section 4.1, footnote 3)."""
ATTAINMENT = 0.95
FIXED_SLO_SCALE = 5.0
"""Of the throughput search: inside the range of every panel of figure 5 or next to it. The paper names none."""
UNIFORM_GPUS = (10, 10, 12)
"""Of the ablation; 12 for the largest tier as in section 4.3."""


@dataclass(frozen=True, slots=True)
class FewShapes:
    """A `Tier` in some of its shapes only, for quick runs."""

    tier: TierModel
    shapes: tuple[ReplicaShape, ...]

    @property
    def key(self) -> str:
        """See `Tier`: a replica's curve does not depend on which other shapes there are."""
        return self.tier.key

    def replicas(self) -> tuple[ReplicaModel, ...]:
        return tuple(replica for replica in self.tier.replicas() if replica.shape in self.shapes)


SMALL = TierModel("R1-Distill-Qwen-7B", "H100")
MIDDLE = TierModel("Llama-3.3-70B", "H100")
"""Stands for DeepSeek-dist-70B, which is this model's architecture with other weights."""
LARGE = TierModel("DeepSeek-R1", "H100", "fp4")
"""Stands for the INT4 AWQ weights of the paper."""
LLAMA_SMALL = TierModel("Llama-3.1-8B", "H100")

_QUICK_SHAPES = {
    SMALL.model: ((1, 1), (2, 1), (4, 1)),
    LLAMA_SMALL.model: ((1, 1), (2, 1), (4, 1), (8, 1)),
    MIDDLE.model: ((2, 1), (4, 1), (8, 1), (2, 2)),
    LARGE.model: ((8, 1), (4, 2), (2, 4)),
}


def tiers_of(models: tuple[TierModel, ...], quick: bool) -> tuple[Tier, ...]:
    """The models in every shape that they fit on, or, quick, in three or four."""
    if not quick:
        return models
    return tuple(FewShapes(tier, tuple(ReplicaShape(*shape) for shape in _QUICK_SHAPES[tier.model])) for tier in models)


@dataclass(frozen=True, slots=True)
class Size:
    """How many targets, requests and seconds the experiments simulate, full or quick."""

    seeds: int
    """Each case, and the drifting workload, is run with so many."""
    seconds: float
    """How long requests arrive for in a run at the trace's own rate."""
    search_seconds: float
    """The same in a run of the searches for the highest rate within the limit."""
    targets: tuple[float, ...]
    throughput_targets: tuple[float, ...]
    """Those for which the highest rate is searched as well."""
    throughput_requests: int
    """In a run of the searches for it, at most."""
    chunks: tuple[int, ...]
    """Tokens of a step that are tried for Sarathi-Serve, besides the engines' own: "we ... tuned the chunk size to be
    optimal for each case" (appendix F)."""
    other_targets: tuple[float, ...]
    """Quality targets of the workloads with two tiers."""
    other_requests: int
    """In a run of those: their answers are short and their rates high."""
    tolerance: float
    """Relative tolerance of the searches."""
    drift_requests: int
    """A minute of the drifting workload is as long as it takes for so many to come over all minutes, within
    `MINUTE_S`."""
    drift_targets: tuple[float, ...]
    is_quick: bool


TARGETS = (90.0, 85.0, 80.0, 70.0)
FULL = Size(
    seeds=5,
    seconds=60.0,
    search_seconds=120.0,
    targets=TARGETS,
    throughput_targets=TARGETS,
    throughput_requests=8000,
    chunks=(512, 1024, 4096, 8192),
    other_targets=TARGETS,
    other_requests=12_000,
    tolerance=0.08,
    drift_requests=20_000,
    drift_targets=TARGETS,
    is_quick=False,
)
QUICK = Size(
    seeds=2,
    seconds=10.0,
    search_seconds=30.0,
    targets=TARGETS,
    throughput_targets=(90.0, 85.0),
    throughput_requests=2000,
    chunks=(1024,),
    other_targets=(85.0,),
    other_requests=1000,
    tolerance=0.25,
    drift_requests=5_000,
    drift_targets=(85.0,),
    is_quick=True,
)

SARATHI_QUALITY = 90.0
"""The target for which Sarathi-Serve is measured (appendix F)."""
LOADS = (0.6, 0.8, 1.0)
"""Rates of traces 1 to 3, as parts of what the largest model alone holds on all GPUs."""
PLAN_QUALITY = 85.0
"""Of the plans that are timed and of the fronts."""
DRIFT_MINUTES = (8, 16, 10)
"""Of traces 1, 2 and 3 (section 4.4)."""
WINDOW_REQUESTS = 50
"""Sampled of each window (section 4.4)."""
DRIFT_LOAD = 0.8
"""Rates of the drifting workload: the traces' own times this part of the most at which the system sustains each."""
MINUTE_S = (5.0, 60.0)
SWITCH_MINUTES = 1.0
"""From the decision for a new plan until its replicas serve."""
