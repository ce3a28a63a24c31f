"""One run: a cluster with prefill and decode apart, a workload, and what reschedules."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstancePhase
from controlplane.policies.interface import Policy
from controlplane.policies.registry import create_policy
from controlplane.policies.rescheduling.decode_choice import DecodesByWorth
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner
from simulator.cluster.config import ClusterConfig, InstanceSpec, KvLinkConfig
from simulator.cluster.recording import LoadSeries, RecordingConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.catalogue.deployment import instance_for
from simulator.cost.model import BatchShape, CostModel
from simulator.cost.placement_costs import fitted_costs
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Slo
from simulator.reproductions.run import EngineEra
from simulator.reproductions.star.lengths import LONGEST_TOKENS, Workload, poisson_trace
from simulator.rescheduling.controller import ReschedulingController
from simulator.rescheduling.remaining_lengths import Binned, Every, Figure7Errors, Oracle, RemainingLengths

PREDICTION_MS = 1.40
"""Of the MLP for a batch of 10 requests (section 5.3)."""
PLACEMENT = "least_loaded"
GBIT_IN_GIB = 1e9 / 8 / (1 << 30)
ALMOST_FULL = 0.99
MOST_POINTS = 400
"""Of a run's series, about."""


class Reschedules(StrEnum):
    """The systems compared (section 6.1)."""

    VLLM = "vLLM"
    CURRENT = "STAR w/o prediction"
    PREDICTED = "STAR w/ prediction"
    ORACLE = "STAR Oracle"


class Rival(StrEnum):
    """Systems of ours beside them."""

    TRAJECTORIES = "trajectories"
    TRAJECTORIES_ORACLE = "trajectories Oracle"
    TRAJECTORIES_FROM_START = "trajectories, decode instances chosen by them"


@dataclass(frozen=True, slots=True)
class Hardware:
    """A cluster of the paper: its model, device, link and number of instances."""

    name: str
    prefills: int
    decodes: int
    device: str
    model: str
    weight_dtype: str = ""
    link_gbit_per_s: float = 200.0
    memory_utilisation: float = 0.9
    report_interval_ms: float = 50.0
    """How old what placements go by may be."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """All that a run depends on. Small and hashable: it travels to other processes."""

    hardware: Hardware
    workload: Workload
    system: Reschedules | Rival
    rate_per_s: float
    seconds: float
    slo: Slo
    seed: int = 0
    bins: tuple[int, ...] = ()
    """Edges, where the predictor only tells bins (table 3)."""
    predict_every: int = 20
    """Steps (table 4)."""
    parameters: ReschedulerParameters = field(default_factory=ReschedulerParameters)
    engine_era: EngineEra = EngineEra.CURRENT


class Series(msgspec.Struct, frozen=True):
    """How a run went, at some points in time."""

    times_s: tuple[float, ...]
    variances_ms2: tuple[float, ...]
    fullest: tuple[float, ...]
    """Share of KV blocks held on the fullest decode instance."""


class Result(msgspec.Struct, frozen=True):
    """Results of one experiment. Rates count what ended within the experiment's own time; percentiles count every
    request."""

    seed: int
    throughput_req_s: float
    goodput_req_s: float
    p99_tpot_ms: float
    p50_tpot_ms: float
    p99_ttft_ms: float
    attainment: float
    preemptions: int
    exec_variance_ms2: float
    """Mean over time of the variance of the decode instances' step times."""
    moved: int
    stayed: int
    move_ms: float
    """Mean time from an order to its end, of the requests that moved."""
    full_share: float
    """Of the time in which some decode instance holds more than 99 % of its KV blocks (figure 12)."""
    cpu_s: float
    series: Series


class PredictingCost(CostModel):
    """Another cost model, with the share of the length predictor in every decoding step."""

    def __init__(self, inner: CostModel, step_share_ms: float) -> None:
        self._inner = inner
        self._share_ms = step_share_ms

    def step_ms(self, batch: BatchShape) -> float:
        return self._inner.step_ms(batch) + (self._share_ms if batch.decode_requests else 0.0)

    def decode_run_ms(self, batch: BatchShape, steps: int) -> NDArray[np.float64]:
        return self._inner.decode_run_ms(batch, steps) + self._share_ms


def run(experiment: Experiment) -> Result:
    """Simulate one experiment to its end."""
    started_s = time.process_time()
    config, cost = cluster_of(experiment)
    controller = _controller(experiment)
    trace = poisson_trace(experiment.workload, experiment.rate_per_s, experiment.seconds, experiment.seed)
    policy = create_policy(PLACEMENT)
    if experiment.system is Rival.TRAJECTORIES_FROM_START:
        assert controller is not None
        by_worth = DecodesByWorth(policy, controller.running, TrajectoryPlanner(experiment.parameters))
        policy = cast(Policy, by_worth)
    simulation = ClusterSimulation(
        trace,
        config,
        cost,
        policy,
        () if controller is None else (controller,),
        RecordingConfig(interval_ms=1000.0, max_samples=4096),
    )
    outcomes = simulation.run()
    assert simulation.recording is not None
    series = simulation.recording.series()
    decodes = slice(experiment.hardware.prefills, None)
    times_s, variances = _step_variances(series, decodes, experiment.seconds)
    arriving = series.times_s <= experiment.seconds
    fullest = series.kv_fill[arriving][:, decodes].max(axis=1)
    return Result(
        seed=experiment.seed,
        **_rates(outcomes, experiment),
        preemptions=sum(list(simulation.recording.preemptions.values())[decodes]),
        exec_variance_ms2=float(variances.mean()) if len(variances) else 0.0,
        moved=0 if controller is None else controller.manager.migrations.moved_total,
        stayed=0 if controller is None else controller.manager.migrations.stayed_total,
        move_ms=float(np.mean(controller.moves_ms)) if controller is not None and controller.moves_ms else 0.0,
        full_share=float((fullest > ALMOST_FULL).mean()),
        cpu_s=time.process_time() - started_s,
        series=_thinned(series.times_s[arriving], times_s, variances, fullest),
    )


def cluster_of(experiment: Experiment) -> tuple[ClusterConfig, CostModel]:
    """The cluster that the experiment runs on, and what its steps cost."""
    hardware = experiment.hardware
    instance, cost = instance_for(
        hardware.model,
        hardware.device,
        weight_dtype=hardware.weight_dtype,
        max_model_len_tokens=LONGEST_TOKENS,
        memory_utilisation=hardware.memory_utilisation,
    )
    instance = replace(instance, whole_prompt_must_fit=experiment.engine_era is EngineEra.CURRENT)
    # The paper's systems know of no profile, and move whatever lowers the variance.
    profiled = None if isinstance(experiment.system, Reschedules) else fitted_costs(cost)
    if experiment.system in (Reschedules.PREDICTED, Rival.TRAJECTORIES, Rival.TRAJECTORIES_FROM_START):
        cost = PredictingCost(cost, PREDICTION_MS / experiment.predict_every)
    prefill = InstanceSpec(instance, phase=InstancePhase.PREFILL)
    decode = InstanceSpec(instance, phase=InstancePhase.DECODE, profiled=profiled)
    config = ClusterConfig(
        instances=hardware.prefills + hardware.decodes,
        instance=instance,
        report_interval_ms=hardware.report_interval_ms,
        seed=experiment.seed,
        specs=(prefill,) * hardware.prefills + (decode,) * hardware.decodes,
        link=KvLinkConfig(bandwidth_gib_per_s=hardware.link_gbit_per_s * GBIT_IN_GIB),
    )
    return config, cost


def _controller(experiment: Experiment) -> ReschedulingController | None:
    match experiment.system:
        case Reschedules.VLLM:
            return None
        case Reschedules.CURRENT:
            return ReschedulingController(ReschedulerMode.CURRENT, experiment.parameters)
        case Reschedules.ORACLE:
            return ReschedulingController(ReschedulerMode.PREDICTED, experiment.parameters, Oracle())
        case Rival.TRAJECTORIES_ORACLE:
            return ReschedulingController(ReschedulerMode.TRAJECTORIES, experiment.parameters, Oracle())
        case Reschedules.PREDICTED | Rival.TRAJECTORIES | Rival.TRAJECTORIES_FROM_START:
            lengths: RemainingLengths = Figure7Errors(experiment.seed)
            if experiment.bins:
                lengths = Binned(lengths, experiment.bins)
            lengths = Every(lengths, experiment.predict_every)
            is_rival = isinstance(experiment.system, Rival)
            mode = ReschedulerMode.TRAJECTORIES if is_rival else ReschedulerMode.PREDICTED
            return ReschedulingController(mode, experiment.parameters, lengths)


def _rates(outcomes: Sequence[RequestOutcome], experiment: Experiment) -> dict[str, float]:
    good = [outcome for outcome in outcomes if not outcome.error]
    in_time = [outcome for outcome in good if outcome.finished_s <= experiment.seconds]
    attained = [outcome for outcome in in_time if experiment.slo.is_met_by(outcome)]
    tpot_ms = [outcome.tpot_ms for outcome in good if outcome.tpot_ms is not None]
    ttft_ms = [outcome.ttft_ms for outcome in good if outcome.ttft_ms is not None]
    return {
        "throughput_req_s": len(in_time) / experiment.seconds,
        "goodput_req_s": len(attained) / experiment.seconds,
        "p99_tpot_ms": float(np.percentile(tpot_ms, 99)),
        "p50_tpot_ms": float(np.percentile(tpot_ms, 50)),
        "p99_ttft_ms": float(np.percentile(ttft_ms, 99)),
        "attainment": sum(experiment.slo.is_met_by(outcome) for outcome in good) / len(outcomes),
    }


def _thinned(
    at_s: NDArray[np.float64],
    times_s: NDArray[np.float64],
    variances: NDArray[np.float64],
    fullest: NDArray[np.float64],
) -> Series:
    every = slice(None, None, max(1, len(at_s) // MOST_POINTS))
    of_all = np.interp(at_s, times_s, variances) if len(times_s) else np.zeros(len(at_s))
    columns = ([round(value, 4) for value in column[every].tolist()] for column in (at_s, of_all, fullest))
    return Series(*map(tuple, columns))


def _step_variances(
    series: LoadSeries, decodes: slice, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times and variances of the step times, where every decode instance decodes."""
    step_ms = series.step_ms[:, decodes]
    busy = (step_ms > 0).all(axis=1) & (series.times_s <= seconds)
    return series.times_s[busy], step_ms[busy].var(axis=1)
