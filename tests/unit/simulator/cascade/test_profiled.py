"""Tiers of instances that were measured, of one GPU or of several."""

from itertools import product

import msgspec
import numpy as np
import pytest

from controlplane.model.cascade_goal import CascadeGoal
from controlplane.planning.cascade.bilevel import deploy
from controlplane.planning.cascade.parallelism import LATENCY_LEVELS
from controlplane.planning.cascade.plan import PlannedReplicas
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape
from controlplane.planning.cascade.routing import route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import tier_tables
from controlplane.planning.cascade.workload import write_workload
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError, PlanInfeasible
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.make_plan import make_plan, parse_tier
from simulator.cost.model import BatchShape
from tests.unit.simulator.cascade.instance_profiles import SIZES, profile_of
from tests.unit.simulator.cascade.short_runs import short_runs

SMALL = profile_of("small", 5.0)
LARGE_2, LARGE_4 = profile_of("large", 20.0, 2), profile_of("large", 12.0, 4)
PROFILES = {profile.name: profile for profile in (SMALL, LARGE_2, LARGE_4)}


def sample_at(rate_per_s: float) -> CascadeSample:
    """Every other answer of the small model is worth nothing, all of the large model's are good."""
    rng = np.random.default_rng(3)
    return CascadeSample(
        scores=np.stack([np.tile([0.0, 100.0], 20), np.full(40, 100.0)], axis=1),
        input_tokens=rng.integers(20, 200, 40),
        output_tokens=rng.integers(4, 12, (40, 2)),
        rate_per_s=rate_per_s,
    )


def test_a_measured_tier_has_the_instances_that_were_measured() -> None:
    tier = parse_tier("profile:vllm/small/H100", 4, PROFILES)
    (replica,) = tier.replicas()
    assert (replica.shape, replica.engine.kv_blocks, replica.engines) == (ReplicaShape(1), 1000, 1)
    assert replica.cost.step_ms(BatchShape((), np.array([100]), 100)) == pytest.approx(5.0)
    with pytest.raises(ConfigurationError, match="no profile 'y'; profiles known: vllm/large/H100/tp2, "):
        parse_tier("profile:y", 4, PROFILES)


def test_each_profile_of_a_tier_is_a_shape_and_those_that_do_not_fit_are_left_out() -> None:
    both = "profile:vllm/large/H100/tp4,vllm/large/H100/tp2"
    assert [replica.shape.gpus for replica in parse_tier(both, 8, PROFILES).replicas()] == [2, 4]
    assert [replica.shape.gpus for replica in parse_tier(both, 3, PROFILES).replicas()] == [2]
    with pytest.raises(ConfigurationError, match=r"large/H100/tp4 takes 4 GPUs \(TP=4\), and there are 3"):
        parse_tier("profile:vllm/large/H100/tp4", 3, PROFILES)
    (cut,) = parse_tier("profile:cut", 8, {"cut": profile_of("m", 9.0, 2, 3)}).replicas()
    assert (cut.shape, cut.shape.gpus) == (ReplicaShape(2, 3), 6)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (profile_of("large", 9.0, 8, device="A100"), "not of vllm/large/A100, vllm/large/H100"),
        (profile_of("small", 9.0, 8), "not of vllm/large/H100, vllm/small/H100"),
        (profile_of("large", 9.0, 2), "these are of TP=2, TP=2"),
    ],
)
def test_profiles_that_make_no_tier_together_are_refused(other: InstanceProfile, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        parse_tier("profile:a,b", 8, {"a": LARGE_2, "b": other})


def test_tables_are_kept_by_what_was_measured() -> None:
    def key(*profiles: InstanceProfile) -> str:
        named = {str(number): profile for number, profile in enumerate(profiles)}
        return parse_tier(f"profile:{','.join(named)}", 8, named).key

    # The same in every process, or tables in files would never be found again.
    assert key(LARGE_2) == "vllm|large|H100|tp2:4840b31fc2e868ff"
    assert key(LARGE_2, LARGE_4) == key(LARGE_4, LARGE_2)
    others = (
        profile_of("large", 21.0, 2),
        msgspec.structs.replace(LARGE_2, sizes=msgspec.structs.replace(SIZES, kv_blocks=99)),
        msgspec.structs.replace(LARGE_2, tensor_parallel=1),
    )
    assert len({key(LARGE_2), *map(key, others)}) == 4


def enumerated_latency_s(curves: list[tuple[ReplicaCurve, ...]], rates_per_s: list[float], gpus: int) -> float:
    """The slowest tier's p95 with the best of all replicas of all tiers that `gpus` have room for."""
    of_tiers = []
    for of_tier, rate_per_s in zip(curves, rates_per_s, strict=True):
        p95_s = np.concatenate([curve.p95_s for curve in of_tier])
        levels_s = np.geomspace(p95_s.min(), p95_s.max(), LATENCY_LEVELS)
        levels_s[0], levels_s[-1] = p95_s.min(), p95_s.max()
        sustained = np.array([curve.sustained_rate_per_s(levels_s, "p95") for curve in of_tier])
        least_s: dict[int, float] = {}
        for counts in product(*(range(gpus // curve.shape.gpus + 1) for curve in of_tier)):
            taken = sum(count * curve.shape.gpus for count, curve in zip(counts, of_tier, strict=True))
            holds = np.array(counts) @ sustained >= rate_per_s
            latency_s = float(levels_s[holds.argmax()]) if holds.any() else np.inf
            least_s[taken] = min(latency_s, least_s.get(taken, np.inf))
        of_tiers.append(least_s)
    splits = product(*(of_tier.items() for of_tier in of_tiers))
    return min(
        (max(latency_s for _, latency_s in split) for split in splits if sum(taken for taken, _ in split) <= gpus),
        default=np.inf,
    )


@pytest.mark.slow
def test_profiles_of_unlike_gpu_counts_are_mixed_as_enumeration_finds_best() -> None:
    tiers = [
        parse_tier("profile:vllm/small/H100", 16, PROFILES),
        parse_tier("profile:vllm/large/H100/tp2,vllm/large/H100/tp4", 16, PROFILES),
    ]
    curves = SimulatedCurves(sample_at(1.0), tiers)
    requests = [np.arange(40), np.arange(0, 40, 2)]
    measured = [curves.curves(tier, of, sample_at(1.0).output_tokens[of, tier]) for tier, of in enumerate(requests)]
    most = [float(curve.rates_per_s[-1]) for curve in measured[1]]
    mixes = set()
    # From what the wide instance holds alone to what both shapes hold together, and more.
    for rate_per_s in (most[0], 2.1 * most[0], 2 * (most[0] + most[1]), 5.5 * most[1]):
        sample = sample_at(rate_per_s)
        routed = route(sample, (50.0,))
        assert routed.shares == (1.0, 0.5)
        for gpus in range(2, 13):
            tables = tier_tables(sample, routed, curves, gpus, judge_s=0.0)
            found = deploy(sample, routed, tables, gpus)
            expected_s = enumerated_latency_s(measured, [rate_per_s, rate_per_s / 2], gpus)
            if found is None:
                assert expected_s == np.inf, (rate_per_s, gpus)
                continue
            assert found.latency_s == pytest.approx(expected_s, rel=1e-12), (rate_per_s, gpus)
            taken = [sum(shape.gpus * count for shape, count in mix) for mix in found.mixes]
            assert all(used <= granted for used, granted in zip(taken, found.gpus, strict=True))
            assert sum(taken) <= gpus
            mixes.add(tuple(shape.tp for shape, _ in found.mixes[1]))
    assert {(2,), (4,), (2, 4)} <= mixes


@pytest.mark.slow
@short_runs()
def test_a_plan_counts_all_gpus_of_the_instances_that_were_profiled() -> None:
    tier = parse_tier("profile:vllm/large/H100/tp4", 16, PROFILES)
    everything = np.arange(40)
    (curve,) = SimulatedCurves(sample_at(1.0), [tier]).curves(0, everything, sample_at(1.0).output_tokens[:, 1])
    sample = sample_at(1.5 * float(curve.rates_per_s[-1]))  # more than one instance holds, less than two
    workload = tuple(
        write_workload(
            ("large",),
            CascadeSample(sample.scores[:, 1:], sample.input_tokens, sample.output_tokens[:, 1:], sample.rate_per_s),
        )
    )

    def planned_on(gpus: int, profiles: dict[str, InstanceProfile]) -> tuple[PlannedReplicas, ...]:
        goal = CascadeGoal("both", gpus=gpus, tiers=("profile:large",), quality=90.0)
        (planned,) = make_plan(goal, workload, profiles=profiles).plan.tiers
        assert planned.gpus == sum(each.count * each.tp * each.pp for each in planned.replicas)
        return planned.replicas

    assert planned_on(8, {"large": LARGE_4}) == (PlannedReplicas(2, tp=4),)
    with pytest.raises(PlanInfeasible, match="7 GPUs do not hold"):
        planned_on(7, {"large": LARGE_4})
    pipelined = msgspec.structs.replace(LARGE_4, tensor_parallel=2, pipeline_parallel=2)
    assert planned_on(8, {"large": pipelined}) == (PlannedReplicas(2, tp=2, pp=2),)
    unknown = msgspec.structs.replace(LARGE_4, tensor_parallel=1)
    assert planned_on(2, {"large": unknown}) == (PlannedReplicas(2),), "as profiles without a shape count"
