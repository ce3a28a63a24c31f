"""Testbed, loads, rivals and the settings that they are tuned over (LMetric, sections 4.1 and 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType

import msgspec
import numpy as np

from simulator.cluster.config import ClusterConfig
from simulator.cost.catalogue import instance_for
from simulator.cost.model import CostModel
from simulator.cost.placement_costs import fitted_costs
from simulator.instance.config import InstanceConfig
from simulator.report.report import Slo
from simulator.reproductions.measurement import System
from simulator.reproductions.run import ReproductionRun
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context, scale_rate
from simulator.traces.source import SYNTHETIC, TraceRecipe, open_trace
from simulator.traces.synthetic import SyntheticWorkload, synthetic_trace

INSTANCES, QUICK_CHAT_INSTANCES = 16, 8
DEVICE = "H20"
CHAT_MODEL, API_MODEL = "Qwen3-30B-A3B", "Qwen2-7B"
CHAT_SLO = Slo(ttft_ms=2000, tpot_ms=100)
LONG_CHAT_SLO = Slo(ttft_ms=10_000, tpot_ms=100)
AGENT_SLO = Slo(ttft_ms=60_000, tpot_ms=100)
"""The highest rates are those at which 90 % of the requests keep these. An agent's first prompt takes one H20 up to
half a minute by itself."""

CONVERSATIONS = SyntheticWorkload(
    request_rate_per_s=4.0,
    mean_turns=2.8,
    mean_pause_s=30.0,
    first_prompt_median_tokens=1230.0,
    next_prompt_median_tokens=120.0,
    output_median_tokens=250.0,
    max_input_tokens=32_768,
)
"""The rate is for each instance. Stands for the paper's chat trace, which is not at hand. Known of that trace: prompts
of 2.3k tokens on average, and that an infinite cache would have 62 % of their tokens (Wang et al., KVCache Cache in
the Wild, ATC 2025)."""

OURS = "lmetric"
VLLM = "vllm"
LINEAR, FILTER, LLMD = "bailian", "aibrix", "llm-d"
NOT_TUNED = "not tuned"


@dataclass(frozen=True, slots=True)
class Contender:
    """A policy with its settings."""

    policy: str
    parameters: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __reduce__(self) -> "tuple[type[Contender], tuple[str, dict[str, float]]]":
        """Pickled by its fields, because mappings that cannot be changed (`MappingProxyType`) cannot be pickled."""
        return Contender, (self.policy, dict(self.parameters))


@dataclass(frozen=True, slots=True)
class Load:
    """What is replayed on a model: first for a while to fill the caches, then to be measured."""

    name: str
    model: str
    trace: str
    """`synthetic`: the conversations above."""
    slo: Slo
    warm_s: float
    clip_s: float
    """Measured after the `warm_s`, in the trace's own time."""
    quick_warm_s: float
    quick_clip_s: float
    start_scale: float
    """Of the trace's own rate: where the search for the highest one begins."""
    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 0.9)
    """Of the highest rate: the curve over the load."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A load as one run replays it. Small: it travels to other processes."""

    load: Load
    path: str
    quick: bool

    @property
    def warm_s(self) -> float:
        """In the trace's own time."""
        return self.load.quick_warm_s if self.quick else self.load.warm_s

    @property
    def clip_s(self) -> float:
        """In the trace's own time."""
        return self.load.quick_clip_s if self.quick else self.load.clip_s

    @property
    def instances(self) -> int:
        """Of the testbed: half as many with --quick where conversations are drawn, so that they last long enough."""
        return QUICK_CHAT_INSTANCES if self.quick and self.path == SYNTHETIC else INSTANCES

    def requests(self, scale: float, seed: int) -> tuple[list[TraceRequest], int]:
        """The requests at `scale` times the trace's rate, and how many of them come first to fill the caches.

        More conversations in the same time; a recorded trace in less time.
        """
        end_s = self.warm_s + self.clip_s
        if self.path == SYNTHETIC:
            rate_per_s = scale * self.instances * CONVERSATIONS.request_rate_per_s
            workload = replace(CONVERSATIONS, duration_s=end_s, request_rate_per_s=rate_per_s)
            return _counted(list(synthetic_trace(workload, np.random.default_rng(seed))), self.warm_s)
        config, _ = instance_of(self.load.model)
        recorded = open_trace(TraceRecipe(self.path, seed=seed, clip_end_s=end_s))
        fitting = (fit_context(request, config.max_model_len_tokens) for request in recorded)
        return _counted(list(scale_rate(fitting, scale)), self.warm_s / scale)


def _counted(requests: list[TraceRequest], warm_s: float) -> tuple[list[TraceRequest], int]:
    return requests, sum(request.arrival_s < warm_s for request in requests)


_KNEE = (0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
LOADS = (
    Load(f"chat, {CHAT_MODEL}", CHAT_MODEL, SYNTHETIC, CHAT_SLO, 90.0, 120.0, 60.0, 60.0, 1.0, _KNEE),
    Load(
        f"long prompts, {CHAT_MODEL}", CHAT_MODEL, "mooncake_conversation.jsonl.gz", LONG_CHAT_SLO,
        300.0, 300.0, 45.0, 45.0, 3.0,
    ),
    Load(
        f"long prompts, {API_MODEL}", API_MODEL, "mooncake_conversation.jsonl.gz", LONG_CHAT_SLO,
        300.0, 300.0, 45.0, 45.0, 1.7,
    ),
    Load(
        f"coding agents, {CHAT_MODEL}", CHAT_MODEL, "agentic_claude_code_A.jsonl.gz", AGENT_SLO,
        600.0, 600.0, 100.0, 200.0, 0.5,
    ),
)  # fmt: skip

PLAIN: Mapping[str, Contender] = MappingProxyType(
    {
        OURS: Contender("lmetric"),
        "lmetric, BS + 1": Contender("lmetric_plus"),
        "lmetric, hotspot detector": Contender("lmetric_hotspot"),
        VLLM: Contender("least_loaded"),
        "round robin": Contender("round_robin"),
        "random two": Contender("random_two"),
        "(1 - hit) x BS": Contender("hit_ratio_x_batch"),
        "P-token x tokens": Contender("p_token_x_tokens"),
    }
)
"""Policies without settings, or at their defaults: LMetric and its variants, controls, indicator ablations."""


LAMBDAS, QUICK_LAMBDAS = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9), (0.3, 0.5, 0.7, 0.9)
RANGES, QUICK_RANGES = (2, 4, 8, 16, 32), (2, 8, 32)


def rivals(model: str, *, quick: bool) -> dict[str, dict[str, Contender]]:
    """What each rival may be tuned to; the best on a trace stands for it there, as in the paper."""
    return {
        LINEAR: {
            f"lambda {each:g}": Contender("linear", {"lambda": each}) for each in (QUICK_LAMBDAS if quick else LAMBDAS)
        },
        "dynamo": {
            f"weight {each:g}": Contender("dynamo", {"prefill_weight": each})
            for each in ((1.0, 4.0) if quick else (0.25, 1.0, 4.0, 16.0))
        },
        FILTER: {f"range {each}": Contender("filter", {"range": each}) for each in (QUICK_RANGES if quick else RANGES)},
        LLMD: {
            "tuned": Contender("simulation", fitted_parameters(model)),
            NOT_TUNED: Contender("simulation", fitted_parameters(_other(model))),
        },
    }


def _other(model: str) -> str:
    """The paper's untuned simulator is one that was tuned for another model (section 4.6)."""
    return API_MODEL if model == CHAT_MODEL else CHAT_MODEL


@lru_cache(maxsize=4)
def instance_of(model: str) -> tuple[InstanceConfig, CostModel]:
    """One GPU of the testbed."""
    return instance_for(model, DEVICE, 1, max_queued_requests=100_000)


def system_of(replay: Replay, contender: Contender, seed: int) -> System:
    """The testbed under a policy."""
    config, cost = instance_of(replay.load.model)
    cluster = ClusterConfig(instances=replay.instances, instance=config, seed=seed)
    return System(cluster, cost, contender.policy, dict(contender.parameters))


def replay_of(run: ReproductionRun, load: Load) -> Replay:
    """Raises `ConfigurationError` where the trace is missing."""
    path = SYNTHETIC if load.trace == SYNTHETIC else run.trace(load.trace)
    return Replay(load, path, run.quick)


@lru_cache(maxsize=4)
def fitted_parameters(model: str) -> dict[str, float]:
    """The simulation-based policy's cost of a step, fitted to the modelled engine: its tuning."""
    _, cost = instance_of(model)
    parameters: dict[str, float] = msgspec.to_builtins(fitted_costs(cost))
    return parameters
