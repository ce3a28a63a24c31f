"""Plans whose latencies are those of the whole deployment in its steady state, under the policy that will run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult
from controlplane.planning.cascade.corrected import CorrectedCurves, Correction
from controlplane.planning.cascade.latency import IN_WORDS, STATISTIC, total_latency_s
from controlplane.planning.cascade.plan import SteadyRuns
from controlplane.planning.cascade.promise import QualityPromise, plan_as_asked
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import CurveSource, tier_tables
from mesh.errors import PlanInfeasible
from simulator.cascade.deployed import Deployed
from simulator.cascade.steady import SteadyState, steady_state
from simulator.cascade.tier import Tier
from simulator.report.interval import Estimate

ROUNDS = 4
AGREES = 0.1
"""How far the tables may be off the steady state, relatively, without a further round."""
_LASTING = 2.0
"""What the longest requests take, over the p95 of all tiers together."""


class DeploymentSource(Protocol):
    """Source of deployments' latencies, usually a simulation."""

    def measure(self, planned: PlanResult) -> SteadyState:
        """What the requests take on the planned replicas. Raises `PlanInfeasible` if they refuse one."""
        ...


class SimulatedDeployments:
    """A `DeploymentSource` for a sample: simulates all tiers of a plan together.

    `source` says how much the replicas sustain. `on_deployment` is called with the number of each deployment before it
    is simulated, from 1.
    """

    def __init__(
        self,
        sample: CascadeSample,
        tiers: Sequence[Tier],
        source: CurveSource,
        judge_s: float,
        seed: int = 0,
        on_deployment: Callable[[int], None] | None = None,
    ) -> None:
        self._sample = sample
        self._tiers = tiers
        self._source = source
        self._judge_s = judge_s
        self._seed = seed
        self._on_deployment = on_deployment
        self._simulated = 0

    def measure(self, planned: PlanResult) -> SteadyState:
        """See `DeploymentSource`."""
        self._simulated += 1
        if self._on_deployment is not None:
            self._on_deployment(self._simulated)
        sample, routed, mixes = self._sample, planned.routed, planned.deployment.mixes
        used = [
            table.capacity.utilisation(mix, table.scaled_rate_per_s(routed, sample.rate_per_s))
            for table, mix in zip(tier_tables(sample, routed, self._source, 0, self._judge_s), mixes, strict=True)
        ]
        deployed = Deployed(planned.thresholds, mixes, routed.quality, routed.shares)
        lasting_s = _LASTING * sum(planned.p95_s)
        return steady_state(sample, self._tiers, deployed, used, lasting_s, self._judge_s, self._seed)


@dataclass(frozen=True, slots=True, eq=False)
class SteadyPlan:
    """A plan with the steady state of its deployment."""

    result: PlanResult
    """Its latencies are those of the steady state."""
    promise: QualityPromise | None
    steady: SteadyRuns


def steady_plan(
    sample: CascadeSample,
    source: CurveSource,
    deployments: DeploymentSource,
    request: PlanRequest,
    probability: float,
    label: str = "",
    seed: int = 0,
) -> SteadyPlan:
    """Plan by tables, measure what is planned as a whole, correct the tables by what that took, and plan anew, until
    both agree. The best deployment that was measured is the plan.

    Raises `PlanInfeasible` where none is found, or none keeps the latency.
    """
    corrections = (Correction(),) * sample.tiers
    best: SteadyPlan | None = None
    for _ in range(ROUNDS):
        corrected = CorrectedCurves(source, corrections)
        try:
            result, promise = plan_as_asked(sample, corrected, request, probability, label, seed)
        except PlanInfeasible:
            if best is None:
                raise
            break  # the tables, corrected, know of no other
        state = deployments.measure(result)
        found = SteadyPlan(_with_latencies(result, request, state), promise, _runs(state))
        if best is None or _order(found, request) < _order(best, request):
            best = found
        if _agree(result.p95_s, state.p95_s) and _agree(result.mean_s, state.mean_s):
            break
        corrections = tuple(
            _corrected(before, tier, result, state, request.judge_s) for tier, before in enumerate(corrections)
        )
    assert best is not None, "a round without a plan has raised"
    latency_s = best.result.deployment.latency_s
    if request.latency_s is not None and latency_s > request.latency_s:
        raise PlanInfeasible(
            f"a latency of {request.latency_s:g} s ({IN_WORDS[request.minimise]}) is not met: the best deployment on "
            f"{request.gpus} GPUs takes {latency_s:.2f} s in its steady state; raise the budget, give more GPUs or "
            "plan for a lower rate"
        )
    return best


def _with_latencies(result: PlanResult, request: PlanRequest, state: SteadyState) -> PlanResult:
    p95_s, mean_s = _means(state.p95_s), _means(state.mean_s)
    of_tiers = p95_s if STATISTIC[request.minimise] == "p95" else mean_s
    total_s = total_latency_s(of_tiers, result.routed.shares, request.minimise)
    deployment = replace(result.deployment, latencies_s=of_tiers, latency_s=total_s)
    return replace(result, p95_s=p95_s, mean_s=mean_s, deployment=deployment)


def _order(found: SteadyPlan, request: PlanRequest) -> tuple[bool, bool, float]:
    """Least is best: settled, within the latency, and then what was asked for."""
    latency_s = found.result.deployment.latency_s
    if request.latency_s is None:
        return not found.steady.is_settled, False, latency_s
    return not found.steady.is_settled, latency_s > request.latency_s, -found.result.routed.quality


def _corrected(before: Correction, tier: int, result: PlanResult, state: SteadyState, judge_s: float) -> Correction:
    if not result.routed.shares[tier]:
        return before
    # A judgement takes what it takes, however long the answer did.
    judged_s = judge_s if result.routed.is_judged[tier] else 0.0

    def ratio(planned_s: float, measured: Estimate) -> float:
        assert measured.mean is not None, "every run has measured each tier"
        if min(planned_s, measured.mean) <= judged_s:
            return 1.0
        return (measured.mean - judged_s) / (planned_s - judged_s)

    return Correction(
        before.p95 * ratio(result.p95_s[tier], state.p95_s[tier]),
        before.mean * ratio(result.mean_s[tier], state.mean_s[tier]),
    )


def _agree(planned_s: Sequence[float], measured: Sequence[Estimate]) -> bool:
    pairs = zip(planned_s, _means(measured), strict=True)
    return all(abs(one_s - other_s) <= AGREES * other_s for one_s, other_s in pairs)


def _means(estimates: Sequence[Estimate]) -> tuple[float, ...]:
    return tuple(each.mean or 0.0 for each in estimates)


def _runs(state: SteadyState) -> SteadyRuns:
    return SteadyRuns(
        runs=state.runs,
        requests=state.requests,
        margin_percent=100 * state.margin,
        is_settled=state.is_settled,
        is_overloaded=state.is_overloaded,
        whole_p95_s=state.whole_p95_s.mean or 0.0,
    )
