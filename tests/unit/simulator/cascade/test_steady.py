"""Steady states of replicas and of whole deployments, and plans that rest on them."""

from dataclasses import replace

import numpy as np
import pytest

from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult
from controlplane.planning.cascade.corrected import CorrectedCurves, Correction
from controlplane.planning.cascade.replica import ReplicaShape, Statistic
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import CurveSource, tier_tables
from mesh.errors import PlanInfeasible
from simulator.cascade import steady
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.deployed import Deployed, DrawnRequests, poisson_arrivals, serve
from simulator.cascade.replica import drawn_arrivals_s, drawn_rows, loaded_latency, saturation_per_s
from simulator.cascade.saturated import saturated_per_s
from simulator.cascade.steady import RUNS, SETTLED, SteadyState, steady_state
from simulator.cascade.steady_plan import AGREES, ROUNDS, SimulatedDeployments, steady_plan
from simulator.cascade.tier import TierModel
from simulator.report.interval import Estimate
from tests.unit.controlplane.planning.cascade.analytic_source import AnalyticSource

TIERS = (TierModel("Llama-3.2-3B", "H100", max_gpus=1), TierModel("Llama-3.1-8B", "H100", max_gpus=2))
RNG = np.random.default_rng(1)
ROWS = 60
SAMPLE = CascadeSample(
    scores=np.clip(RNG.normal((55, 85), 12, (ROWS, 2)), 0, 100),
    input_tokens=RNG.integers(50, 600, ROWS),
    output_tokens=RNG.integers(5, 60, (ROWS, 2)),
    rate_per_s=20.0,
)
ONE_EACH = (((ReplicaShape(1), 1),), ((ReplicaShape(1), 1),))


def test_a_run_has_exactly_the_rate_and_the_lengths_that_it_is_for() -> None:
    rows = drawn_rows(np.random.default_rng(0), 7, 70)
    assert np.bincount(rows).tolist() == [10] * 7
    arrivals_s = drawn_arrivals_s(np.random.default_rng(0), 4.0, 200)
    assert arrivals_s[-1] == pytest.approx(50.0)
    assert (np.diff(arrivals_s) > 0).all()


@pytest.mark.slow
def test_a_deployment_serves_what_its_slowest_tier_sustains() -> None:
    shares = 1.0, float((SAMPLE.scores[:, 0] < 50).mean())
    deployed = Deployed((50.0,), ONE_EACH, 70.0, shares)
    escalated = SAMPLE.scores[:, 0] < 50
    lengths = (
        (SAMPLE.input_tokens, SAMPLE.output_tokens[:, 0]),
        (SAMPLE.input_tokens[escalated], SAMPLE.output_tokens[escalated, 1]),
    )
    each = [
        saturation_per_s(tier.replicas()[0], *of) / share
        for tier, of, share in zip(TIERS, lengths, shares, strict=True)
    ]
    for part in (0.9, 2.0):
        offered = replace(SAMPLE, rate_per_s=part * min(each))
        assert saturated_per_s(offered, TIERS, deployed) == pytest.approx(min(each), rel=0.05)
    only_so_much = replace(SAMPLE, rate_per_s=0.3 * min(each))
    assert saturated_per_s(only_so_much, TIERS, deployed) == pytest.approx(1.5 * 0.3 * min(each), rel=0.05)


@pytest.mark.slow
def test_unlike_replicas_serve_together_what_they_sustain_one_by_one() -> None:
    one_tier = replace(SAMPLE, output_tokens=SAMPLE.output_tokens[:, ::-1])
    slow, fast = TIERS[1].replicas()[:2]
    both = sum(saturation_per_s(each, SAMPLE.input_tokens, SAMPLE.output_tokens[:, 1]) for each in (slow, fast))
    deployed = Deployed((0.0,), (((slow.shape, 1), (fast.shape, 1)), ()), 50.0, (1.0, 0.0))
    found = saturated_per_s(replace(one_tier, rate_per_s=both), TIERS[::-1], deployed)
    assert found == pytest.approx(both, rel=0.05), "a slow one that empties its queue when all have come does not count"


@pytest.mark.slow
def test_what_a_table_says_is_what_a_long_run_takes() -> None:
    replica = TIERS[1].replicas()[0]
    inputs, outputs = SAMPLE.input_tokens, SAMPLE.output_tokens[:, 1]
    saturation = saturation_per_s(replica, inputs, outputs)
    one_tier = replace(SAMPLE, output_tokens=SAMPLE.output_tokens[:, ::-1])
    alone = Deployed((0.0,), (ONE_EACH[1], ()), 50.0, (1.0, 0.0))
    for part in (0.5, 0.9):
        rng = np.random.default_rng(9)
        arrivals = DrawnRequests(drawn_arrivals_s(rng, part * saturation, 10_000), drawn_rows(rng, ROWS, 10_000))
        long_s = serve(one_tier, TIERS[::-1], alone, arrivals, 0.0).latencies_s[2000:]
        table = loaded_latency(replica, inputs, outputs, part, saturation, 0)
        assert table.p95_s == pytest.approx(float(np.quantile(long_s, 0.95)), rel=0.15), part
        assert table.mean_s == pytest.approx(float(long_s.mean()), rel=0.15), part


@pytest.mark.slow
def test_a_deployment_is_simulated_until_its_runs_agree() -> None:
    deployed = Deployed((50.0,), ONE_EACH, 70.0, (1.0, float((SAMPLE.scores[:, 0] < 50).mean())))
    state = steady_state(SAMPLE, TIERS, deployed, (0.3, 0.3), 5.0, judge_s=0.5)
    assert state.is_settled
    assert state.margin <= SETTLED
    assert state.runs == RUNS
    again = steady_state(SAMPLE, TIERS, deployed, (0.3, 0.3), 5.0, judge_s=0.5)
    assert again == state, "a seed, a result"
    quick = steady_state(SAMPLE, TIERS, deployed, (0.3, 0.3), 5.0, judge_s=0.0)
    first, last = (tier.mean or 0.0 for tier in state.mean_s)
    assert first - (quick.mean_s[0].mean or 0.0) == pytest.approx(0.5, rel=0.02), "every answer of the first is judged"
    assert last == pytest.approx(quick.mean_s[1].mean, rel=0.05), "and none of the last"
    whole = first + deployed.shares[1] * last
    assert state.whole_mean_s.mean == pytest.approx(whole, rel=0.02), "a request passes its tiers in turn"


@pytest.mark.slow
def test_a_deployment_that_gets_more_than_it_serves_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady, "_MAX_COUNTED", 1000)
    replica = TIERS[0].replicas()[0]
    saturation = saturation_per_s(replica, SAMPLE.input_tokens, SAMPLE.output_tokens[:, 0])
    alone = Deployed((0.0,), (ONE_EACH[0], ()), 50.0, (1.0, 0.0))
    held, over = (
        steady_state(replace(SAMPLE, rate_per_s=part * saturation), TIERS, alone, (0.5, 0.0), 1.0, judge_s=0.0)
        for part in (0.5, 1.5)
    )
    assert (held.is_settled, held.is_overloaded) == (True, False)
    assert (over.is_settled, over.is_overloaded) == (False, True)


def test_an_answer_that_is_given_up_is_as_short_as_it_is_and_is_not_judged() -> None:
    sample = CascadeSample(
        scores=np.array([[20.0, 90.0]]),
        input_tokens=np.array([50]),
        output_tokens=np.array([[400, 10]]),
        rate_per_s=1.0,
    )
    given_up = replace(sample, score_bounds=((((5, 20.0),), ()),))
    deployed = Deployed((50.0,), ONE_EACH, 90.0, (1.0, 1.0))
    once = DrawnRequests(np.array([0.0]), np.array([0]))
    whole, early = (serve(of, TIERS, deployed, once, judge_s=3.0) for of in (sample, given_up))
    assert early.tiers[0].latencies_s[0] < 0.1 < 3.0 < whole.tiers[0].latencies_s[0]
    assert early.tiers[1].latencies_s[0] == pytest.approx(whole.tiers[1].latencies_s[0])


class KnownDeployments:
    """A `DeploymentSource` by the tables of another source: those are what deployments take."""

    def __init__(self, sample: CascadeSample, truth: CurveSource, judge_s: float) -> None:
        self.measured: list[PlanResult] = []
        self._sample, self._truth, self._judge_s = sample, truth, judge_s

    def measure(self, planned: PlanResult) -> SteadyState:
        """The latencies of the planned mixes by the true tables."""
        self.measured.append(planned)
        p95_s, mean_s = (self._latencies(planned, statistic) for statistic in ("p95", "mean"))
        whole = Estimate(sum(each.mean or 0.0 for each in mean_s))
        return SteadyState(p95_s, mean_s, whole, whole, growth=Estimate(0.0), requests=1000)

    def _latencies(self, planned: PlanResult, statistic: Statistic) -> tuple[Estimate, ...]:
        tables = tier_tables(self._sample, planned.routed, self._truth, 0, self._judge_s, statistic)
        return tuple(
            Estimate(table.latency_of_s(mix, planned.routed, self._sample.rate_per_s))
            for table, mix in zip(tables, planned.deployment.mixes, strict=True)
        )


SHAPES = (ReplicaShape(1),)
TRUTH = AnalyticSource(SAMPLE, (0.002, 0.004), (SHAPES, SHAPES))


def test_tables_that_are_wrong_are_corrected_by_what_deployments_take() -> None:
    request = PlanRequest(gpus=16, quality=70.0)
    right, wrong = KnownDeployments(SAMPLE, TRUTH, 0.0), KnownDeployments(SAMPLE, TRUTH, 0.0)
    of_right = steady_plan(SAMPLE, TRUTH, right, request, 0.0)
    assert len(right.measured) == 1, "tables and deployment agree at once"
    off = CorrectedCurves(TRUTH, (Correction(2.0, 2.0), Correction(0.6, 0.6)))
    of_wrong = steady_plan(SAMPLE, off, wrong, request, 0.0)
    assert 1 < len(wrong.measured) <= ROUNDS
    assert wrong.measured[0].deployment.gpus != of_right.result.deployment.gpus
    assert of_wrong.result.deployment.gpus == of_right.result.deployment.gpus
    assert of_wrong.result.deployment.latency_s == pytest.approx(of_right.result.deployment.latency_s, rel=AGREES)
    state = wrong.measure(of_wrong.result)
    assert of_wrong.result.p95_s == tuple(each.mean for each in state.p95_s), "it says what its deployment takes"
    assert of_wrong.result.mean_s == tuple(each.mean for each in state.mean_s)


def test_a_latency_that_only_the_tables_keep_is_refused() -> None:
    optimistic = CorrectedCurves(TRUTH, (Correction(0.05, 0.05),) * 2)
    alone_s = float(np.quantile(TRUTH.work(0).whole_s, 0.95))
    request = PlanRequest(gpus=8, latency_s=0.2 * alone_s)
    with pytest.raises(PlanInfeasible, match=r"a latency of .* is not met: the best deployment .* in its steady state"):
        steady_plan(SAMPLE, optimistic, KnownDeployments(SAMPLE, TRUTH, 0.0), request, 0.0)


@pytest.mark.slow
def test_a_plan_says_what_its_deployment_takes() -> None:
    source = SimulatedCurves(SAMPLE, TIERS)
    request = PlanRequest(gpus=3, quality=70.0, judge_s=0.1)
    numbers: list[int] = []
    deployments = SimulatedDeployments(SAMPLE, TIERS, source, 0.1, on_deployment=numbers.append)
    planned = steady_plan(SAMPLE, source, deployments, request, 0.0)
    assert numbers == list(range(1, len(numbers) + 1))
    assert planned.steady.is_settled
    made = planned.result
    deployed = Deployed(made.thresholds, made.deployment.mixes, 70.0, made.routed.shares)
    served = serve(SAMPLE, TIERS, deployed, poisson_arrivals(SAMPLE, SAMPLE.rate_per_s, 400.0, 5), 0.1)
    for said_s, took_s in zip(made.p95_s, served.tier_p95_s, strict=True):
        assert said_s == pytest.approx(took_s, rel=0.1)
