"""The fluid mesh against requests one by one; the optimum against all others; scalers in it."""

from itertools import pairwise, product

import numpy as np
import pytest

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import ReplicaKind
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.policies.registry import create_policy
from mesh.errors import TraceError
from simulator.autoscale.arrivals import arrivals_of_rates, lengths_of_cdf
from simulator.autoscale.curve import Lengths, SloLimits, capacity_curve
from simulator.autoscale.mesh import FluidMesh, StartUp
from simulator.autoscale.mixed import alone, replay_mix
from simulator.autoscale.optimum import optimum
from simulator.autoscale.replay import STEP_S, Span, best_with_hindsight, cheapest_target, replay
from simulator.autoscale.scalers import ManagerScaler, QueueScaler, UtilisationScaler
from simulator.cascade.tier import ReplicaModel, TierModel
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.traces.request import TraceRequest

CURVE = CapacityCurve((0.5, 1.0, 1.5, 2.0, 2.5), (1.0, 1.0, 0.995, 0.9, 0.2), (1.0, 2.0, 4.0, 8.0, 20.0), 2.2)
TIMES = StartUp(cold_start_s=120.0, drain_s=30.0)


def _replica() -> ReplicaModel:
    return next(each for each in TierModel("Llama-3.1-8B", "H100").replicas() if each.shape.gpus == 1)


@pytest.mark.slow
def test_the_fluid_mesh_is_close_to_requests_one_by_one() -> None:
    """Of a load that doubles and falls again; the fluid one is off by at most two points of the SLO's share."""
    replica, rng = _replica(), np.random.default_rng(1)
    lengths = Lengths(np.full(64, 6000), rng.integers(200, 400, 64))
    slo = SloLimits(ttft_ms=1500, tpot_ms=40)
    curve = capacity_curve(replica, lengths, slo, pool=3, requests=500, policy="least_loaded", seed=1)
    capacity = curve.capacity_per_s(0.9)
    rates = [3 * capacity * part for part in (0.4, 0.7, 0.9, 0.5)]
    arrivals_s = np.cumsum(np.concatenate([rng.exponential(1 / rate, round(rate * 60)) for rate in rates]))
    trace = [
        TraceRequest(at_s, int(lengths.input_tokens[row % 64]), int(lengths.output_tokens[row % 64]))
        for row, at_s in enumerate(arrivals_s.tolist())
    ]
    config = ClusterConfig(instances=3, instance=replica.engine)
    outcomes = ClusterSimulation(trace, config, replica.cost, create_policy("least_loaded")).run()
    exact = sum(map(slo.kept_by, outcomes)) / len(outcomes)
    mesh = FluidMesh(curve, TIMES, STEP_S, serving=3)
    for count in np.bincount((arrivals_s / STEP_S).astype(int)).tolist():
        mesh.advance(count)
        mesh.validate()
    assert exact == pytest.approx(mesh.kept / mesh.requests, abs=0.02)


def test_a_replica_is_paid_from_the_order_to_the_end_of_its_drain() -> None:
    mesh = FluidMesh(CURVE, TIMES, STEP_S, serving=1)
    mesh.advance(0)
    mesh.scale(2)
    for _ in range(7):
        mesh.advance(0)
    assert (mesh.serving, mesh.wanted) == (1, 2)
    mesh.advance(0)
    assert mesh.serving == 2
    assert mesh.replica_s == STEP_S * (1 + 8 * 2)
    mesh.scale(1)
    for _ in range(4):
        mesh.advance(0)
    assert mesh.replica_s == STEP_S * (1 + 8 * 2 + 1 * 2 + 3)


def test_more_than_saturation_waits_and_is_late() -> None:
    mesh = FluidMesh(CURVE, TIMES, STEP_S, serving=1)
    for _ in range(8):
        mesh.advance(60)
    assert mesh.state.waiting > 0
    late = mesh.kept
    mesh.advance(10)
    assert mesh.kept == late, "those who come behind the backlog are late too"


def test_the_optimum_is_the_cheapest_of_all() -> None:
    arrivals = np.array([30, 90, 150, 60, 20, 100])
    found = optimum(arrivals, 60.0, CURVE, TIMES, 0.97, 1, 3)
    assert found.kept_share >= 0.97
    cheapest = float("inf")
    for path in product((1, 2, 3), repeat=len(arrivals)):
        kept = sum(n * CURVE.share_at(n / 60 / count) for n, count in zip(arrivals.tolist(), path, strict=True))
        moved = sum(
            max(0, after - before) * TIMES.cold_start_s + max(0, before - after) * TIMES.drain_s
            for before, after in pairwise(path)
        )
        if kept / arrivals.sum() >= 0.97:
            cheapest = min(cheapest, 60.0 * sum(path) + moved)
    # A price on late requests finds the cheapest of those that lie on the lower hull.
    assert cheapest <= found.replica_s <= cheapest * 1.15


def test_scalers_follow_a_day_and_the_manager_keeps_the_slo() -> None:
    rng = np.random.default_rng(0)
    day = round(86_400 / STEP_S)
    rates = 8 + 5 * np.sin(2 * np.pi * np.arange(2 * day) / day)
    arrivals = rng.poisson(rates * STEP_S)
    spans = (Span(day, 2 * day),)
    policy = AutoscalePolicy("m", ttft_ms=1, maximum=20, cold_start_s=120.0)
    (ours,) = replay(arrivals, spans, CURVE, TIMES, 0.99, ManagerScaler(policy, CURVE))
    (queue,) = replay(arrivals, spans, CURVE, TIMES, 0.99, QueueScaler(3.0, 1, 20))
    (used,) = replay(arrivals, spans, CURVE, TIMES, 0.99, UtilisationScaler(0.6, 1, 20))
    least = best_with_hindsight(arrivals, spans[0], CURVE, TIMES, 0.99, 1, 20)
    assert ours.kept_share >= 0.99
    for each in (ours, queue, used):
        assert each.least < each.most
        assert each.replica_hours >= least.replica_hours or each.kept_share < 0.99
    target = cheapest_target(
        (0.4, 0.6, 0.9), lambda part: UtilisationScaler(part, 1, 20), arrivals, Span(0, day), CURVE, TIMES, 0.99
    )
    assert target in (0.4, 0.6)


def test_a_mix_of_kinds_costs_less_than_any_of_them_alone() -> None:
    """The small kind is dear, the large one is coarse: the base load is for one, the rest for the other."""
    rng = np.random.default_rng(0)
    day = round(36_000 / STEP_S)
    rates = 8 + 5 * np.sin(2 * np.pi * np.arange(day) / day)
    arrivals = rng.poisson(rates * STEP_S)
    kinds = (ReplicaKind(1.0, 0.5, "A10"), ReplicaKind(3.0, 6.0, "H100", tp=2))
    policy = AutoscalePolicy("m", ttft_ms=1, maximum=60, cold_start_s=120.0, kinds=kinds)
    spans = (Span(day // 8, day),)
    (mixed,) = replay_mix(arrivals, spans, CURVE, TIMES, policy)
    single = {name: replay_mix(arrivals, spans, CURVE, TIMES, each)[0] for name, each in alone(policy).items()}
    assert mixed.kept_share >= 0.99
    assert mixed.cost < 0.97 * min(each.cost for each in single.values())
    assert all(hours > 0 for hours in mixed.hours.values())
    assert set(single) == set(mixed.hours)
    for name, each in single.items():
        assert each.kept_share >= 0.99
        assert each.cost == pytest.approx({"A10 TP=1": 1.0, "H100 TP=2": 6.0}[name] * each.hours[name])


def test_rates_become_arrivals_within_their_band() -> None:
    lines = ["minute_since_start,req_per_min_low,req_per_min_mid,req_per_min_high", "10,600,600,600", "20,60,90,120"]
    arrivals = arrivals_of_rates(lines, STEP_S, np.random.default_rng(0))
    assert len(arrivals) == 20 * 4
    assert arrivals[:40].mean() == pytest.approx(150, rel=0.1)
    assert 15 <= arrivals[44:].mean() <= 30
    with pytest.raises(TraceError, match="ascending"):
        arrivals_of_rates([lines[0], lines[2], lines[1]], STEP_S, np.random.default_rng(0))
    with pytest.raises(TraceError, match="columns"):
        arrivals_of_rates(["a,b"], STEP_S, np.random.default_rng(0))


def test_lengths_follow_their_distribution() -> None:
    lines = ["field,cdf_percent,tokens", "input,0,100", "input,100,300", "output,0,0", "output,100,10"]
    found = lengths_of_cdf(lines, np.random.default_rng(0))
    assert found.input_tokens.mean() == pytest.approx(200, rel=0.05)
    assert found.output_tokens.min() == 1
    with pytest.raises(TraceError, match="both"):
        lengths_of_cdf(lines[:3], np.random.default_rng(0))
