"""Which runs are made, by name; nothing here runs anything."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import PartitionMethod
from controlplane.policies.stages.agent import RoutingMode
from controlplane.policies.stages.refinement import Refinement
from simulator.cost.catalogue.unevenness import UNEVENNESS
from simulator.reproductions.cascadeinfer.profiling import ProfileBounds, ProfileResult
from simulator.reproductions.cascadeinfer.systems import (
    RunResult,
    Setting,
    SystemKind,
    Variant,
    profile_setting,
    run_system,
)

Jobs: TypeAlias = dict[str, Callable[[], RunResult]]

SMALL, MODERATE = "Llama-3.2-3B", "Qwen2.5-14B"
OURS = Variant(SystemKind.CASCADE)
IDLE_RATE, IDLE_S = 0.5, 120.0
"""Minimum load: hardly ever two requests at once, on 16 instances."""
SYSTEMS = {kind: Variant(kind) for kind in SystemKind}
LAYOUTS = {
    "chain": replace(OURS, method=PartitionMethod.CHAIN),
    "no pipeline": replace(OURS, method=PartitionMethod.SINGLE),
    "two-phase heuristic": replace(OURS, method=PartitionMethod.HEURISTIC, cuts_per_octave=1),
}
REFINEMENTS = {
    "quantity": replace(OURS, refinement=Refinement.QUANTITY),
    "memory": replace(OURS, refinement=Refinement.MEMORY),
    "frozen": replace(OURS, refinement=Refinement.FROZEN),
}
FOUR_BY_FOUR = replace(OURS, sizes=(4, 4, 4, 4))
BALANCING = {
    "round robin": replace(FOUR_BY_FOUR, routing_mode=RoutingMode.ROUND_ROBIN, rebalance=False),
    "inter-stage bid-ask": replace(FOUR_BY_FOUR, rebalance=False),
    "full bid-ask": FOUR_BY_FOUR,
}


@dataclass(frozen=True, slots=True)
class Scale:
    """The rates and durations of all experiments, full or quick."""

    duration_s: float
    small_rates: tuple[float, ...]
    """Ascending; of requests per second on all instances."""
    heavy: int
    """So many of the highest rates are heavy load."""
    moderate_rates: tuple[float, ...]
    long_rates: tuple[float, ...]
    """For lengths up to 128K."""
    profile: ProfileBounds

    @property
    def heavy_rates(self) -> tuple[float, ...]:
        return self.small_rates[-self.heavy :]

    @property
    def busy_rate(self) -> float:
        """The highest below heavy load: beyond capacity every instance is full, however requests are dealt out."""
        return self.small_rates[-self.heavy - 1]

    @property
    def heaviest(self) -> float:
        return self.small_rates[-1]


FULL = Scale(
    duration_s=60.0,
    small_rates=(40.0, 80.0, 100.0, 120.0),
    heavy=2,
    moderate_rates=(12.0, 24.0),
    long_rates=(8.0,),
    profile=ProfileBounds(30.0, 1024, 1200),
)
QUICK = Scale(
    duration_s=30.0,
    small_rates=(40.0, 100.0),
    heavy=1,
    moderate_rates=(18.0,),
    long_rates=(6.0,),
    profile=ProfileBounds(20.0, 1024, 400, batch_factor=4),
)


def settings(data: Path, seed: int) -> dict[str, Setting]:
    """Models and lengths that are profiled and run."""
    small = Setting(SMALL, data, seed=seed)
    return {
        "small": small,
        "moderate": replace(small, model=MODERATE),
        "level": replace(small, heterogeneity=False),
        "measured": replace(small, unevenness=UNEVENNESS["RTX-PRO-6000"]),
        "long": replace(small, lengths="mooncake"),
    }


def profile_jobs(made: dict[str, Setting], scale: Scale) -> dict[str, Callable[[], ProfileResult]]:
    """The profiling runs, one for each setting, by name."""
    return {f"profile {name}": partial(profile_setting, setting, scale.profile) for name, setting in made.items()}


def with_quality(made: dict[str, Setting], models: dict[str, QoeModel]) -> dict[str, Setting]:
    """Settings that know their quality model."""
    return {name: replace(setting, quality=models[name]) for name, setting in made.items()}


def run_jobs(made: dict[str, Setting], scale: Scale) -> Jobs:
    """Every run, under the name by which `findings` asks for it."""
    jobs: Jobs = {}

    def add(part: str, setting: str, variants: dict[str, Variant], rates: tuple[float, ...]) -> None:
        for name, variant in variants.items():
            for rate in rates:
                jobs[job_name(part, name, rate)] = partial(run_system, made[setting], variant, rate, scale.duration_s)

    systems = {kind.value: variant for kind, variant in SYSTEMS.items()}
    rivals = {kind.value: SYSTEMS[kind] for kind in (SystemKind.VLLM, SystemKind.LLUMNIX, SystemKind.CASCADE)}
    add("small", "small", systems, scale.small_rates)
    idle = partial(run_system, made["small"], SYSTEMS[SystemKind.VLLM], IDLE_RATE, IDLE_S)
    jobs[job_name("idle", "idle", IDLE_RATE)] = idle
    add("moderate", "moderate", systems, scale.moderate_rates)
    add("level", "level", rivals, scale.heavy_rates)
    without_llumnix = {name: variant for name, variant in rivals.items() if variant.kind is not SystemKind.LLUMNIX}
    add("measured", "measured", without_llumnix, scale.heavy_rates)
    add("long", "long", rivals, scale.long_rates)
    add("layout", "small", LAYOUTS, scale.heavy_rates)
    add("refinement", "small", REFINEMENTS, scale.heavy_rates)
    add("balancing", "small", BALANCING, (scale.busy_rate,))
    return jobs


def job_name(part: str, variant: str, rate_req_s: float) -> str:
    """The key under which a run's result is found."""
    return f"{part}: {variant} at {rate_req_s:g}/s"
