"""The cheapest mix of kinds of replica, against all combinations."""

from itertools import product
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.replica_kind import KindReplicas, ReplicaKind
from controlplane.planning.autoscale.mix import STAY_S, Bounds, Mix, cheapest_mix, next_mix, standing_mix

PRICES, CAPACITIES = st.sampled_from([1.0, 2.0, 2.5, 3.3]), st.sampled_from([0.4, 1.0, 2.0, 3.7])
SMALL, LARGE = ReplicaKind(1.0, 2.0, gpu="A10", maximum=9), ReplicaKind(3.0, 8.0, gpu="H100", tp=2, maximum=2)
BOTH = (SMALL, LARGE)
FREE = Bounds(0, 100)


@st.composite
def cases(draw: st.DrawFn) -> tuple[float, Bounds, Mix, float]:
    kinds = tuple(
        ReplicaKind(
            draw(PRICES), draw(CAPACITIES), f"gpu{number}", draw(st.sampled_from([1, 2])), 1, draw(st.integers(1, 4))
        )
        for number in range(draw(st.integers(1, 3)))
    )
    standing = Mix(kinds, tuple(draw(st.integers(0, kind.maximum)) for kind in kinds))
    bounds = Bounds(draw(st.integers(0, 3)), draw(st.integers(3, 9)), draw(st.sampled_from([inf, 10.0, 25.0])))
    return draw(st.floats(0, 25)), bounds, standing, draw(st.sampled_from([0.0, 120.0, 1800.0]))


def worth(mix: Mix, load: float, bounds: Bounds, standing: Mix, cold_start_s: float) -> tuple[float, float, float]:
    """What is least: replicas that the minimum lacks, load that is not held, and the cost with what is started."""
    started = sum(
        max(0, new - old) * kind.replica_price_per_hour * cold_start_s / STAY_S
        for kind, new, old in zip(mix.kinds, mix.counts, standing.counts, strict=True)
    )
    unheld = round(max(0.0, load - mix.capacity_per_s), 6)
    return max(0, bounds.minimum - mix.replicas), unheld, mix.cost_per_hour + started


def is_within(mix: Mix, bounds: Bounds) -> bool:
    return mix.replicas <= bounds.maximum and mix.cost_per_hour <= bounds.budget_per_hour + 1e-6


@given(cases())
def test_no_combination_is_cheaper(case: tuple[float, Bounds, Mix, float]) -> None:
    load, bounds, standing, cold_start_s = case
    found = cheapest_mix(load, bounds, standing, cold_start_s)
    found.validate()
    assert is_within(found, bounds)
    assert found.is_proven
    every = (Mix(found.kinds, each) for each in product(*(range(kind.maximum + 1) for kind in found.kinds)))
    best = min(worth(mix, load, bounds, standing, cold_start_s) for mix in every if is_within(mix, bounds))
    assert worth(found, load, bounds, standing, cold_start_s) == pytest.approx(best, abs=1e-5)


@given(cases(), st.booleans())
def test_a_step_never_gives_up_what_it_replaces_and_ends_at_the_cheapest(
    case: tuple[float, Bounds, Mix, float], is_under_way: bool
) -> None:
    load, bounds, standing, cold_start_s = case
    if not is_within(standing, bounds):
        return
    step = next_mix(load, bounds, standing, cold_start_s, is_under_way)
    assert is_within(step, bounds)
    pairs = list(zip(step.counts, standing.counts, strict=True))
    if any(new < old for new, old in pairs) and (any(new > old for new, old in pairs) or is_under_way):
        assert standing.capacity_per_s < load or standing.replicas < bounds.minimum, (
            "else what stands would have held it"
        )
    for _ in range(3):
        standing = next_mix(load, bounds, standing, cold_start_s, False)
    assert next_mix(load, bounds, standing, cold_start_s, False).counts == standing.counts, "no to and fro"


def test_the_mix_of_two_kinds_follows_the_load_and_what_there_is() -> None:
    none = Mix(BOTH, (0, 0))
    assert str(cheapest_mix(1.0, FREE, none, 0.0)) == "1 x A10 TP=1"
    assert cheapest_mix(8.0, FREE, none, 0.0).counts == (4, 0), "four at 1 for 8 beside one at 6"
    assert cheapest_mix(30.0, FREE, none, 0.0).counts == (7, 2)
    most = cheapest_mix(99.0, Bounds(0, 100, 10.0), none, 0.0)
    assert (most.capacity_per_s, most.cost_per_hour) == (18.0, 9.0), "as much as the budget pays for: nine small ones"


def test_savings_smaller_than_a_start_switch_nothing() -> None:
    other = ReplicaKind(0.99, 2.0, gpu="L4")
    standing = Mix((SMALL, other), (3, 0))
    assert cheapest_mix(6.0, FREE, standing, 300.0).counts == (3, 0)
    assert cheapest_mix(6.0, FREE, standing, 0.0).counts == (0, 3)
    assert next_mix(6.0, FREE, standing, 0.0, False).counts == (3, 3), "first the others, beside"
    assert next_mix(6.0, FREE, Mix((SMALL, other), (3, 3)), 0.0, True).counts == (3, 3), "until they serve"
    assert next_mix(6.0, FREE, Mix((SMALL, other), (3, 3)), 0.0, False).counts == (0, 3)


def test_kinds_of_one_price_for_a_capacity_are_no_long_search() -> None:
    alike = tuple(ReplicaKind(1.0, float(tp), tp=tp) for tp in (1, 2, 4, 8))
    found = cheapest_mix(777.7, Bounds(0, 1024), Mix(alike, (0,) * 4), 120.0)
    assert found.is_proven
    assert found.capacity_per_s == 778


def test_what_stands_of_other_kinds_is_not_counted() -> None:
    stands = (KindReplicas(2, "H100", 2), KindReplicas(5, "T4"), KindReplicas(99, "A10"))
    assert standing_mix(BOTH, stands).counts == (9, 2)
