"""Testbed, traces, rivals and the settings that they are tuned over (LMetric, sections 4.1 and 6)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from controlplane.prediction.least_squares import non_negative_least_squares
from simulator.cluster.config import ClusterConfig
from simulator.cost.catalogue import instance_for
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.instance.config import InstanceConfig
from simulator.report.report import Slo
from simulator.reproductions.measurement import System, Workload
from simulator.reproductions.run import ReproductionRun
from simulator.traces.source import TraceRecipe

INSTANCES = 16
DEVICE = "H20"
CHAT_MODEL, API_MODEL = "Qwen3-30B-A3B", "Qwen2-7B"
CHAT_SLO, AGENT_SLO = Slo(ttft_ms=10_000, tpot_ms=100), Slo(ttft_ms=60_000, tpot_ms=100)
"""For the reports' attainment; no claim of the paper is about it. An agent's first prompt takes one H20 up to half a
minute by itself."""

OURS = "lmetric"
VLLM = "vllm"
LLMD = "llm-d"


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
    """The beginning of a trace on a model."""

    name: str
    model: str
    trace: str
    slo: Slo
    clip_s: float
    quick_clip_s: float

    def seconds(self, quick: bool) -> float:
        """How many seconds of the trace are replayed."""
        return self.quick_clip_s if quick else self.clip_s


LOADS = (
    Load("chat, Qwen3-30B-A3B", CHAT_MODEL, "mooncake_conversation.jsonl.gz", CHAT_SLO, 600.0, 90.0),
    Load("chat, Qwen2-7B", API_MODEL, "mooncake_conversation.jsonl.gz", CHAT_SLO, 600.0, 90.0),
    Load("coding agents, Qwen3-30B-A3B", CHAT_MODEL, "agentic_claude_code_A.jsonl.gz", AGENT_SLO, 1200.0, 300.0),
)

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


def rivals(model: str) -> dict[str, dict[str, Contender]]:
    """What each rival may be tuned to; the best on a trace stands for it there, as in the paper."""
    return {
        "bailian": {
            f"lambda {each:g}": Contender("linear", {"lambda": each}) for each in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
        },
        "dynamo": {
            f"weight {each:g}": Contender("dynamo", {"prefill_weight": each}) for each in (0.25, 1.0, 4.0, 16.0)
        },
        "aibrix": {f"range {each}": Contender("filter", {"range": each}) for each in (2, 4, 8, 16, 32)},
        LLMD: {
            "tuned": Contender("simulation", fitted_parameters(model)),
            "not tuned": Contender("simulation", fitted_parameters(_other(model))),
        },
    }


def _other(model: str) -> str:
    """The paper's untuned simulator is one that was tuned for another model (section 4.6)."""
    return API_MODEL if model == CHAT_MODEL else CHAT_MODEL


@lru_cache(maxsize=4)
def instance_of(model: str) -> tuple[InstanceConfig, CostModel]:
    """One GPU of the testbed."""
    return instance_for(model, DEVICE, 1, max_queued_requests=100_000)


def system_of(model: str, contender: Contender, seed: int) -> System:
    """The testbed under a policy."""
    config, cost = instance_of(model)
    cluster = ClusterConfig(instances=INSTANCES, instance=config, seed=seed)
    return System(cluster, cost, contender.policy, dict(contender.parameters))


def workload_of(run: ReproductionRun, load: Load) -> Workload:
    """The beginning of the trace."""
    recipe = TraceRecipe(run.trace(load.trace), seed=run.seed, clip_end_s=load.seconds(run.quick))
    return Workload(recipe, load.slo)


@lru_cache(maxsize=4)
def fitted_parameters(model: str) -> dict[str, float]:
    """The simulation-based policy's cost of a step, fitted to the modelled engine: its tuning."""
    _, cost = instance_of(model)
    rng = np.random.default_rng(0)
    rows, durations_ms = [], []
    for _ in range(400):
        decodes = int(rng.integers(0, 65))
        contexts = np.sort(rng.integers(200, 20_000, decodes))
        new, before = (int(rng.integers(1, 2048)), int(rng.integers(0, 20_000))) if rng.random() < 0.6 else (0, 0)
        if not decodes and not new:
            continue
        prefill = (PrefillChunk(new, before),) if new else ()
        durations_ms.append(cost.step_ms(BatchShape(prefill, contexts, int(contexts.sum()))))
        rows.append((1.0, new, decodes, float(contexts.sum()), new * (before + (new + 1) / 2)))
    features, targets = np.array(rows), np.array(durations_ms)
    fitted = non_negative_least_squares(features / targets[:, None], np.ones(len(targets)))
    names = ("fixed_ms", "prefill_token_ms", "decode_request_ms", "context_token_ms", "attended_pair_ms")
    return dict(zip(names, fitted.tolist(), strict=True))
