"""The systems that are compared, and one run of one of them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import numpy as np

from controlplane.model.migration_order import MigrationOrder
from controlplane.planning.population import Population
from controlplane.planning.qoe import QoeModel
from controlplane.planning.stage_partition import (
    PartitionMethod,
    PartitionProblem,
    find_plan,
    log_cuts,
    plan_of_sizes,
)
from controlplane.planning.stage_plan import StagePlan
from controlplane.policies.interface import Policy
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.round_robin import RoundRobin
from controlplane.policies.stages.agent import RoutingMode, StageParameters
from controlplane.policies.stages.layout import StageLayout, assign
from controlplane.policies.stages.placement import Stages
from controlplane.policies.stages.refinement import Refinement, RefinementParameters
from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig, InstanceSpec, KvLinkConfig
from simulator.cluster.control import Cluster, ClusterEvent, Controller
from simulator.cluster.simulation import ClusterSimulation
from simulator.cluster.stages import StageController
from simulator.cost.catalogue import DEVICES, instance_for
from simulator.cost.fitted.unevenness import UnevennessTable
from simulator.cost.model import CostModel
from simulator.cost.placement_costs import fitted_costs
from simulator.instance.config import InstanceConfig
from simulator.report.outcome import RequestOutcome
from simulator.reproductions.cascadeinfer.llumnix import FreenessDispatch, LoadMigration
from simulator.reproductions.cascadeinfer.profiling import ProfileBounds, ProfileResult, fit_on_halves
from simulator.reproductions.cascadeinfer.workload import Lengths, poisson_requests, read_mooncake, read_sharegpt
from simulator.rescheduling.controller import ReschedulingController
from simulator.rescheduling.remaining_lengths import Oracle

INSTANCES = 16
CONTEXT_TOKENS = 131_072
BATCH = 1024
"""vLLM's default, as in the paper."""
VLLM_CHUNK_TOKENS = 2048
SGLANG_CHUNK_TOKENS = 8192
"""SGLang's default, and what vLLM takes on devices of 70 GiB and more; 2,048 is its default elsewhere."""
LINK = KvLinkConfig(bandwidth_gib_per_s=46.0)
"""400 Gbit/s, less headers: the slower one of the testbed's two ways."""
H20_141GB = replace(DEVICES["H20"], name="H20-141G", memory_bytes=DEVICES["H200"].memory_bytes)
MODEL_NAME = "m"


class SystemKind(StrEnum):
    """CascadeInfer and the systems that it is compared with."""

    VLLM = "vLLM, round robin"
    SGLANG = "SGLang-like, round robin"
    LLUMNIX = "Llumnix-like"
    CASCADE = "CascadeInfer"


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a device with a data set."""

    model: str
    data: Path
    lengths: str = "sharegpt"
    heterogeneity: bool = True
    """Of the cost model's decode attention; off, only totals count."""
    unevenness: UnevennessTable | None = None
    """As measured on some card, in place of the tile model."""
    quality: QoeModel | None = None
    """As profiled; only CascadeInfer needs it."""
    seed: int = 0

    def instance(self, kind: SystemKind) -> tuple[InstanceConfig, CostModel]:
        chunk = SGLANG_CHUNK_TOKENS if kind is SystemKind.SGLANG else VLLM_CHUNK_TOKENS
        return instance_for(
            self.model,
            H20_141GB,
            heterogeneity=self.heterogeneity,
            unevenness=self.unevenness,
            max_batch_requests=BATCH,
            max_step_tokens=chunk,
            max_model_len_tokens=CONTEXT_TOKENS,
            max_queued_requests=1 << 16,
        )


@dataclass(frozen=True, slots=True)
class Variant:
    """A system, and for CascadeInfer what is changed of it."""

    kind: SystemKind
    method: PartitionMethod = PartitionMethod.EXACT
    cuts_per_octave: int = 4
    refinement: Refinement = Refinement.QUALITY
    routing_mode: RoutingMode = RoutingMode.BID_ASK
    rebalance: bool = True
    sizes: tuple[int, ...] = ()
    """Instances of each stage; empty: the partition finds them."""
    reschedules: bool = False
    """By trajectories, of lengths and costs of steps that are known; within the stages, where there are any."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one run showed; times in ms, NaN where nothing was measured."""

    rate_req_s: float
    requests: int
    mean_ttft_ms: float
    p95_ttft_ms: float
    mean_tpot_ms: float
    p95_tpot_ms: float
    normalised_ms: float
    """Mean over the requests of (end to end / output tokens)."""
    p95_normalised_ms: float
    throughput_tok_s: float
    """Tokens generated while requests arrived, over that time."""
    ttfts_ms: tuple[float, ...]
    tpots_ms: tuple[float, ...]
    moved: int = 0
    """By stages."""
    rescheduled: int = 0
    kept: dict[str, int] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    boundaries_tokens: tuple[int, ...] = ()
    refined_tokens: tuple[int, ...] = ()
    output_cv: tuple[float, ...] = ()
    """For each stage: standard deviation over mean of its instances' output tokens."""

    def attainment(self, ttft_ms: float, tpot_ms: float) -> float:
        """Share of requests within both bounds."""
        met = (np.array(self.ttfts_ms) <= ttft_ms) & (np.nan_to_num(np.array(self.tpots_ms)) <= tpot_ms)
        return float(met.mean())


class OutputTokens:
    """A `Controller` that only looks: tokens that each instance has generated by the end of the arrivals."""

    interval_ms: float | None = 1000.0

    def __init__(self, until_s: float) -> None:
        self.by_instance: dict[str, int] = {}
        self._until_ms = 1000 * until_s

    def attached(self, cluster: Cluster) -> None:
        """Part of `Controller`; needs nothing of the simulation in advance."""

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """Part of `Controller`; counts by the clock, not by events."""

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        if now_ms <= self._until_ms:
            self.by_instance = {each: cluster.load(each).generated_tokens_total for each in cluster.instance_ids()}
        return ()


@lru_cache(maxsize=4)
def lengths_of(setting: Setting) -> Lengths:
    """The prompt and answer lengths of the setting's data set."""
    if setting.lengths == "sharegpt":
        return read_sharegpt(setting.data / "lengths" / "sharegpt_8k_llama2.csv.gz")
    return read_mooncake(setting.data / "traces" / "mooncake_conversation.jsonl.gz", CONTEXT_TOKENS)


def profile_setting(setting: Setting, bounds: ProfileBounds) -> ProfileResult:
    """Profile the setting's own instance with lengths of its own data set."""
    config, cost = setting.instance(SystemKind.CASCADE)
    return fit_on_halves(lengths_of(setting), config, cost, bounds, np.random.default_rng(setting.seed))


def _quality(setting: Setting) -> QoeModel:
    if setting.quality is None:
        raise ConfigurationError("a plan of stages needs a profile; give the setting its quality model")
    return setting.quality


def in_flight(model: QoeModel, lengths: Lengths, rate_req_s: float, config: InstanceConfig) -> float:
    """Requests in flight on all instances at a rate, by Little's law with the model's own latency, as far as memory
    holds them: n = (rate / instances) x output x Q(n)."""
    one = _population(lengths, 1.0)
    load = one.loads_up_to(np.array([one.longest_tokens]))[0]
    per_request_ms = float(load @ model.coefficients[1:])
    tokens_s = rate_req_s / INSTANCES * float(one.output_tokens.mean()) / 1000
    most = min(config.max_batch_requests, config.kv_blocks * config.block_tokens / float(load[3]))
    if tokens_s * per_request_ms >= 1:
        return INSTANCES * most
    return INSTANCES * min(most, max(1.0, tokens_s * model.base_ms / (1 - tokens_s * per_request_ms)))


def _population(lengths: Lengths, in_flight_requests: float) -> Population:
    inputs, outputs = np.array(lengths, dtype=np.float64).T
    return Population.of(inputs, outputs, in_flight_requests)


def plan_for(setting: Setting, variant: Variant, rate_req_s: float) -> StagePlan:
    """From the data set's lengths, the paper's 'request statistics over the period'."""
    model, lengths = _quality(setting), lengths_of(setting)
    config, _ = setting.instance(variant.kind)
    population = _population(lengths, in_flight(model, lengths, rate_req_s, config))
    cuts = log_cuts(population.longest_tokens, variant.cuts_per_octave)
    transfer_token_ms = config.block_bytes / config.block_tokens / LINK.bytes_per_ms
    problem = PartitionProblem.of(population, model, cuts, transfer_token_ms)
    if variant.sizes:
        return plan_of_sizes(problem, variant.sizes)
    return find_plan(problem, INSTANCES, variant.method)


def run_system(setting: Setting, variant: Variant, rate_req_s: float, duration_s: float) -> RunResult:
    """Requests arrive for `duration_s`; the run ends when all have ended."""
    config, cost = setting.instance(variant.kind)
    profiled = fitted_costs(cost) if variant.reschedules else None
    specs = (InstanceSpec(config, profiled=profiled),) * INSTANCES
    cluster = ClusterConfig(INSTANCES, config, model=MODEL_NAME, seed=setting.seed, link=LINK, specs=specs)
    requests = poisson_requests(
        lengths_of(setting), rate_req_s, duration_s, np.random.default_rng((setting.seed, round(1000 * rate_req_s)))
    )
    policy, controllers = _made(setting, variant, rate_req_s)
    counter = OutputTokens(duration_s)
    outcomes = ClusterSimulation(requests, cluster, cost, policy, controllers=(*controllers, counter)).run()
    result = _result(rate_req_s, duration_s, outcomes)
    rescheduler = next((each for each in controllers if isinstance(each, ReschedulingController)), None)
    if rescheduler is not None:
        result = replace(result, rescheduled=rescheduler.manager.migrations.moved_total)
    staged = next((each for each in controllers if isinstance(each, StageController)), None)
    if staged is None:
        return result
    return replace(
        result,
        moved=staged.moved,
        kept=dict(Counter(staged.kept).most_common(8)),
        stages=tuple(len(stage) for stage in staged.layout.stages),
        boundaries_tokens=staged.layout.boundaries_tokens,
        refined_tokens=staged.layout.refined(_last_boundaries(staged)).boundaries_tokens,
        output_cv=tuple(_cv([counter.by_instance.get(each, 0) for each in stage]) for stage in staged.layout.stages),
    )


def _made(setting: Setting, variant: Variant, rate_req_s: float) -> tuple[Policy, tuple[Controller, ...]]:
    match variant.kind:
        case SystemKind.VLLM | SystemKind.SGLANG:
            return RoundRobin(), (_rescheduler(),) if variant.reschedules else ()
        case SystemKind.LLUMNIX:
            return FreenessDispatch(), (LoadMigration(),)
        case SystemKind.CASCADE:
            plan = plan_for(setting, variant, rate_req_s)
            layout: StageLayout = assign(
                plan, [f"instance-{number}" for number in range(INSTANCES)], model=MODEL_NAME, revision=1
            )
            parameters = StageParameters(
                RefinementParameters(policy=variant.refinement),
                variant.routing_mode,
                # Workers leave it to the rescheduler (`StageManager.is_rescheduled`).
                variant.rebalance and not variant.reschedules,
            )
            policy = Stages(round_robin=variant.routing_mode is RoutingMode.ROUND_ROBIN)
            model = _quality(setting)
            staged = StageController(layout, model, policy, parameters)
            return policy, (staged, _rescheduler(layout.stage_with)) if variant.reschedules else (staged,)


def _rescheduler(stage_of: Callable[[str], int | None] = lambda instance_id: None) -> ReschedulingController:
    return ReschedulingController(ReschedulerMode.TRAJECTORIES, ReschedulerParameters(), Oracle(), stage_of=stage_of)


def _last_boundaries(staged: StageController) -> dict[str, float]:
    return {instance_id: tokens for _, instance_id, tokens in staged.boundaries if np.isfinite(tokens)}


def _cv(values: Sequence[int]) -> float:
    mean = float(np.mean(values))
    return float(np.std(values)) / mean if mean else 0.0


def _result(rate_req_s: float, duration_s: float, outcomes: Sequence[RequestOutcome]) -> RunResult:
    good = [outcome for outcome in outcomes if not outcome.error]
    ttfts = np.array([outcome.ttft_ms for outcome in good], dtype=np.float64)
    tpots = np.array([np.nan if outcome.tpot_ms is None else outcome.tpot_ms for outcome in good], dtype=np.float64)
    normalised = np.array([(outcome.e2e_ms or np.nan) / outcome.output_tokens for outcome in good])
    return RunResult(
        rate_req_s=rate_req_s,
        requests=len(outcomes),
        mean_ttft_ms=float(ttfts.mean()),
        p95_ttft_ms=float(np.percentile(ttfts, 95)),
        mean_tpot_ms=float(np.nanmean(tpots)),
        p95_tpot_ms=float(np.nanpercentile(tpots, 95)),
        normalised_ms=float(normalised.mean()),
        p95_normalised_ms=float(np.percentile(normalised, 95)),
        throughput_tok_s=sum(_tokens_by(outcome, duration_s) for outcome in good) / duration_s,
        ttfts_ms=tuple(ttfts.tolist()),
        tpots_ms=tuple(tpots.tolist()),
    )


def _tokens_by(outcome: RequestOutcome, now_s: float) -> float:
    """Tokens out by then, taken to be evenly spaced between the first and the last."""
    first_s, last_s = outcome.first_token_s, outcome.last_token_s
    if first_s is None or last_s is None or first_s >= now_s:
        return 0.0
    if last_s <= now_s:
        return float(outcome.output_tokens)
    return 1 + (outcome.output_tokens - 1) * (now_s - first_s) / (last_s - first_s)
