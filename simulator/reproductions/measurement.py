"""One system under one load: the measurement that rate sweeps and searches are made of."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import islice

from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.model import CostModel
from simulator.report.outcome import RequestOutcome
from simulator.report.report import Report, Slo, summarise
from simulator.reproductions.sustainable_rate import RateSearch, SustainableRate, sustainable_rate
from simulator.traces.request import TraceRequest
from simulator.traces.reshape import fit_context, scale_rate
from simulator.traces.source import TraceRecipe, open_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and what its requests ask for. Hashable and small: it travels to other processes."""

    recipe: TraceRecipe
    slo: Slo
    max_requests: int | None = None
    keeps_prefixes: bool = True
    """False: no request shares anything with another, as on engines that cache no prefixes."""


@dataclass(frozen=True, slots=True)
class System:
    """A cluster under a placement policy."""

    cluster: ClusterConfig
    cost: CostModel
    policy: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The report of one run at one rate."""

    scale: float
    offered_req_s: float
    """Requests per second that arrive, over the time in which they arrive."""
    report: Report

    @property
    def attainment(self) -> float:
        """Share of all requests, failed ones included, that met the SLO."""
        return self.report.slo.attainment or 0.0


@dataclass(frozen=True, slots=True)
class SustainedLoad:
    """The highest rate that met the target, and all that was measured on the way."""

    found: SustainableRate
    points: tuple[LoadPoint, ...]
    """In ascending order of scale."""
    own_req_s: float
    """Mean rate of the workload at scale 1."""

    @property
    def req_s(self) -> float | None:
        """None where even the lowest rate tried missed the target."""
        return None if self.found.scale is None else self.found.scale * self.own_req_s


def outcomes_at(system: System, workload: Workload, scale: float) -> list[RequestOutcome]:
    """The requests' outcomes with arrivals `scale` times as dense."""
    policy = create_policy(system.policy, system.parameters)
    requests = list(scale_rate(requests_of(workload, system), scale))
    return ClusterSimulation(requests, system.cluster, system.cost, policy).run()


def measure(system: System, workload: Workload, scale: float) -> LoadPoint:
    """Simulate `workload` at `scale` times its own rate and summarise it."""
    outcomes = outcomes_at(system, workload, scale)
    report = summarise(outcomes, workload.slo, policy=system.policy, seed=workload.recipe.seed)
    return LoadPoint(scale, own_req_s(workload, system) * scale, report)


def sweep_rates(system: System, workload: Workload, scales: Sequence[float]) -> tuple[LoadPoint, ...]:
    """One `LoadPoint` for each scale of the workload's own rate."""
    return tuple(measure(system, workload, scale) for scale in scales)


def sweep_jobs(
    systems: Mapping[str, System], workload: Workload, scales: Sequence[float]
) -> dict[str, Callable[[], LoadPoint]]:
    """The runs of a sweep over several systems as independent jobs, named `SYSTEM x SCALE`."""
    return {
        f"{name} x {scale:g}": partial(measure, system, workload, scale)
        for name, system in systems.items()
        for scale in scales
    }


def find_sustainable_rate(system: System, workload: Workload, search: RateSearch) -> SustainedLoad:
    """Bisect the rate scale for the search's attainment target."""
    points: dict[float, LoadPoint] = {}

    def attainment_at(scale: float) -> float:
        points[scale] = measure(system, workload, scale)
        return points[scale].attainment

    found = sustainable_rate(attainment_at, search)
    ordered = tuple(points[scale] for scale in sorted(points))
    return SustainedLoad(found, ordered, own_req_s(workload, system))


def own_req_s(workload: Workload, system: System) -> float:
    """Mean rate of the workload's requests at scale 1, from the first arrival to the last."""
    requests = requests_of(workload, system)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else 0.0


def requests_of(workload: Workload, system: System) -> tuple[TraceRequest, ...]:
    """The workload at scale 1, as the system's context lets it be. Raises TraceError."""
    return _requests(workload, system.cluster.instance.max_model_len_tokens)


@lru_cache(maxsize=4)
def _requests(workload: Workload, max_model_len_tokens: int) -> tuple[TraceRequest, ...]:
    """Read once a process: a search asks for the same trace again and again. Raises TraceError."""
    recipe = replace(workload.recipe, rate_scale=1.0)
    requests: Iterable[TraceRequest] = islice(open_trace(recipe), workload.max_requests)
    if not workload.keeps_prefixes:
        requests = (replace(request, prefix_block_ids=(), block_tokens=0) for request in requests)
    return tuple(
        fit_context(request, max_model_len_tokens) for request in scale_rate(requests, workload.recipe.rate_scale)
    )
