"""Arrow's testbed: workloads, systems and their parameters (Arrow, section 7.1)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from controlplane.prediction.ttft import TtftCurve
from controlplane.protocols.migration.limits import ManagerLimits
from simulator.cluster.config import ClusterConfig, KvLinkConfig, MigrationConfig
from simulator.cost.catalogue import instance_for
from simulator.cost.roofline.efficiency import Efficiency
from simulator.report.report import Slo
from simulator.reproductions.instance_profile import fit_instance, profile_running_tokens
from simulator.reproductions.measurement import System, Workload
from simulator.reproductions.run import ReproductionRun
from simulator.traces.source import TraceRecipe

MODEL = "Llama-3.1-8B"
DEVICE = "H800"
GPUS = 8
BLOCK_TOKENS = 64
"""Not vLLM's 16: a quarter of the work. Without shared prefixes a block is but the unit of memory."""
NVLINK_GIB_PER_S = 186.0
"""400 GB/s in both directions together."""
LINK = KvLinkConfig(latency_ms=1.0, bandwidth_gib_per_s=NVLINK_GIB_PER_S)
TRANSFERS = MigrationConfig(ManagerLimits(transfer=ManagerLimits().stop_and_copy))
"""The request pauses with its first token until its KV has been pulled, as figure 3 has it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A row of table 1 and what the paper found on it."""

    name: str
    file: str
    slo: Slo
    quick_requests: int
    clip_end_s: float = float("inf")
    over_colocated: float | None = None
    """Arrow's sustainable rate over vLLM's with tensor parallelism 8."""
    over_static: float | None = None
    """Over vLLM-disaggregated's, one prefill and one decode instance with tensor parallelism 4 each."""
    over_minimal_load: float | None = None
    minimal_over_round_robin: float | None = None
    """Largest gain in SLO attainment at the same rate, in percentage points."""


TRACES = (
    Trace(
        "Azure Code",
        "azure2023_code.csv.gz",
        Slo(ttft_ms=3000, tpot_ms=100),
        quick_requests=1200,
        over_colocated=5.62,
        over_static=7.78,
        over_minimal_load=1.67,
        minimal_over_round_robin=4.3,
    ),
    Trace(
        "Azure Conversation",
        "azure2023_conv.csv.gz",
        Slo(ttft_ms=2000, tpot_ms=150),
        quick_requests=1600,
        over_colocated=3.76,
        over_static=4.06,
        over_minimal_load=1.1,
        minimal_over_round_robin=2.4,
    ),
    Trace(
        "Mooncake",
        "mooncake_conversation.jsonl.gz",
        Slo(ttft_ms=30_000, tpot_ms=100),
        quick_requests=600,
        clip_end_s=600.0,
        over_colocated=3.73,
        over_static=4.14,
    ),
)


def workload(trace: Trace, run: ReproductionRun) -> Workload:
    """The requests of a trace, of which a quick run takes the first ones only.

    No prefix is shared: vLLM 0.7 caches none unless told to, and the paper does not mention it.
    """
    recipe = TraceRecipe(run.trace(trace.file), seed=run.seed, clip_end_s=trace.clip_end_s)
    return Workload(recipe, trace.slo, trace.quick_requests if run.quick else None, keeps_prefixes=False)


ARROW = "Arrow, 8 x TP1"
MINIMAL_LOAD = "minimal load, 4+4 x TP1"
ROUND_ROBIN = "round robin, 4+4 x TP1"
COLOCATED_TP8 = "colocated, TP8"
STATIC_TP4 = "static P/D, TP4+TP4"
COLOCATED_TP1 = "colocated, 8 x TP1"
SYSTEMS = (ARROW, MINIMAL_LOAD, ROUND_ROBIN, COLOCATED_TP8, STATIC_TP4, COLOCATED_TP1)
STATIC = (MINIMAL_LOAD, ROUND_ROBIN)
HOST_SYSTEMS = (ARROW, COLOCATED_TP8, STATIC_TP4, MINIMAL_LOAD)


def systems(trace: Trace, seed: int, host_step_ms: float = 0.0) -> dict[str, System]:
    """Everything that the paper compares, on eight GPUs, and eight single-GPU instances without disaggregation."""
    tp1, tp4, tp8 = (_fleet(GPUS // tp, tp, seed, host_step_ms) for tp in (1, 4, 8))
    return {
        ARROW: arrow(trace, tp1),
        MINIMAL_LOAD: replace(tp1, policy="static_pd", parameters=tp1.parameters),
        ROUND_ROBIN: replace(tp1, policy="static_pd_round_robin", parameters=tp1.parameters),
        COLOCATED_TP8: replace(tp8, policy="colocated"),
        STATIC_TP4: replace(tp4, policy="static_pd"),
        COLOCATED_TP1: replace(tp1, policy="colocated"),
    }


def arrow(trace: Trace, fleet: System, **parameters: float) -> System:
    """Arrow on a fleet, with the SLOs of a trace as its thresholds and Max Running Tokens from a profile."""
    tpot_ms = trace.slo.tpot_ms or 0.0
    profiled = max(1, profile_running_tokens(fleet.cluster.instance, fleet.cost, tpot_ms))
    slos = {"ttft_ms": trace.slo.ttft_ms or 0.0, "tpot_ms": tpot_ms, "max_running_tokens": profiled}
    return replace(fleet, policy="arrow", parameters={**fleet.parameters, **slos, **parameters})


def curve_of(system: System) -> TtftCurve:
    """The TTFT curve that a system's policy goes by."""
    return TtftCurve(
        *(system.parameters[name] for name in ("prefill_fixed_ms", "prefill_token_ms", "prefill_token_squared_ms"))
    )


def fleet_of(gpus: int, seed: int) -> System:
    """A fleet of `gpus` colocated single-GPU instances."""
    return _fleet(gpus, 1, seed, 0.0)


@lru_cache(maxsize=16)
def _fleet(instances: int, tensor_parallel: int, seed: int, host_step_ms: float) -> System:
    efficiency = Efficiency(host_step_ms=host_step_ms)
    config, cost = instance_for(MODEL, DEVICE, tensor_parallel, efficiency=efficiency, block_tokens=BLOCK_TOKENS)
    curve = fit_instance(config, cost)
    parameters: Mapping[str, float] = {
        "prefill_fixed_ms": curve.fixed_ms,
        "prefill_token_ms": curve.token_ms,
        "prefill_token_squared_ms": curve.token_squared_ms,
    }
    cluster = ClusterConfig(instances, config, MODEL, seed=seed, link=LINK, migration=TRANSFERS)
    return System(cluster, cost, "colocated", parameters)
