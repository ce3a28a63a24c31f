import pytest

from simulator.cluster.config import ClusterConfig
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.report.report import Slo
from simulator.reproductions.measurement import System, Workload, find_sustainable_rate, measure, sweep_jobs
from simulator.reproductions.sustainable_rate import RateSearch
from simulator.traces.source import TraceRecipe

SYSTEM = System(ClusterConfig(2, InstanceConfig()), LinearCost(), "least_loaded")
WORKLOAD = Workload(TraceRecipe("synthetic", seed=3, clip_end_s=20), Slo(ttft_ms=1000, tpot_ms=40))


def test_a_rate_scale_makes_arrivals_denser_and_nothing_else() -> None:
    once, twice = measure(SYSTEM, WORKLOAD, 1.0), measure(SYSTEM, WORKLOAD, 2.0)
    assert twice.offered_req_s == pytest.approx(2 * once.offered_req_s)
    assert once.report.requests == twice.report.requests
    assert twice.attainment <= once.attainment


@pytest.mark.slow
def test_the_sustained_rate_meets_the_target_and_a_little_more_does_not() -> None:
    load = find_sustainable_rate(SYSTEM, WORKLOAD, RateSearch(tolerance=0.1))
    assert load.req_s is not None
    assert load.found.scale is not None
    assert measure(SYSTEM, WORKLOAD, load.found.scale).attainment >= 0.9
    above = next(point for point in load.points if point.scale > load.found.scale)
    assert above.scale <= load.found.scale * 1.1 * 1.000001
    assert above.attainment < 0.9


def test_sweep_jobs_give_what_measuring_gives() -> None:
    jobs = sweep_jobs({"ours": SYSTEM}, WORKLOAD, [0.5, 1.0])
    assert list(jobs) == ["ours x 0.5", "ours x 1"]
    assert jobs["ours x 0.5"]() == measure(SYSTEM, WORKLOAD, 0.5)
