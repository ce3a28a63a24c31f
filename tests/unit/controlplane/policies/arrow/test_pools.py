"""The four pools: whatever happens, in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.policies.arrow.pools import TRANSITIONS, ElasticPools, Pool, PoolEvent
from mesh.errors import IllegalTransition

IDS = tuple("abcdef")
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["join", "leave", "to_prefill", "to_decode", "settle"]),
        st.sampled_from(IDS),
        st.booleans(),
        st.booleans(),
    ),
    max_size=60,
)


def apply(pools: ElasticPools, what: str, instance_id: str, one: bool, other: bool) -> None:
    match what:
        case "join":
            pools.join(instance_id)
        case "leave":
            pools.leave(instance_id)
        case "to_prefill":
            pools.assign_prefill(instance_id, one)
        case "to_decode":
            pools.assign_decode(instance_id, one)
        case "settle":
            pools.settle(instance_id, one, other)


@given(EVENTS)
def test_a_refused_event_changes_nothing_and_no_move_takes_the_last_of_a_kind(
    events: list[tuple[str, str, bool, bool]],
) -> None:
    pools = ElasticPools()
    for event in events:
        pools.validate()
        before = {instance_id: pools[instance_id] for instance_id in pools}
        prefilling, decoding = pools.prefilling, pools.decoding
        try:
            apply(pools, *event)
        except (IllegalTransition, KeyError):
            assert {instance_id: pools[instance_id] for instance_id in pools} == before
            continue
        assert pools.prefilling + pools.decoding == len(pools)
        if event[0] != "leave":
            assert pools.prefilling >= min(prefilling, 1)
            assert pools.decoding >= min(decoding, 1)
        changed = {each for each in before if each in pools and pools[each] is not before[each]}
        assert changed <= {event[1]}


@given(st.integers(0, 12))
def test_who_joins_makes_it_half_and_half(instances: int) -> None:
    pools = ElasticPools()
    for number in range(instances):
        pools.join(str(number))
    assert pools.prefilling == -(-instances // 2)


@given(st.sampled_from(Pool), st.booleans(), st.booleans())
def test_an_instance_leaves_its_transition_when_the_old_work_is_done_and_not_before(
    pool: Pool, is_prefilling: bool, is_decoding: bool
) -> None:
    pools = ElasticPools()
    pools._pools = {"a": pool}
    after = pools.settle("a", is_prefilling, is_decoding)
    if pool is Pool.PREFILL_TO_DECODE and not is_prefilling:
        assert after is Pool.DECODE
    elif pool is Pool.DECODE_TO_PREFILL and not is_decoding:
        assert after is Pool.PREFILL
    else:
        assert after is pool


def test_the_table_is_that_of_the_paper() -> None:
    """Out of each pool leads a reassignment to the other kind, and out of a transition the end of the old work."""
    for (pool, event), target in TRANSITIONS.items():
        if event in (PoolEvent.TO_PREFILL, PoolEvent.TO_PREFILL_BUSY):
            assert pool.decodes
            assert target.prefills
        elif event in (PoolEvent.TO_DECODE, PoolEvent.TO_DECODE_BUSY):
            assert pool.prefills
            assert target.decodes
        else:
            assert target in (Pool.PREFILL, Pool.DECODE)
            assert target.prefills == pool.prefills
    assert {pool for pool, _ in TRANSITIONS} == set(Pool)
    assert set(TRANSITIONS.values()) == set(Pool)


def test_an_instance_set_aside_stays_where_it_is() -> None:
    pools = ElasticPools()
    for instance_id in "abc":
        pools.join(instance_id, Pool.DECODE)
    pools.join("d")
    assert pools["d"] is Pool.PREFILL
    with pytest.raises(IllegalTransition, match="set aside"):
        pools.assign_prefill("a", is_decoding=False)
    assert [each for each in pools if pools.is_elastic(each)] == ["d"]
    pools.leave("b")
    pools.validate()


def test_errors_tell_the_story() -> None:
    pools = ElasticPools()
    pools.join("a")
    pools.join("b")
    with pytest.raises(IllegalTransition, match="a is the last one that prefills"):
        pools.assign_decode("a", is_prefilling=True)
    with pytest.raises(IllegalTransition, match="b is the last one that decodes"):
        pools.assign_prefill("b", is_decoding=True)
    with pytest.raises(IllegalTransition, match="c leaves"):
        pools.leave("c")
    pools.join("c")
    with pytest.raises(IllegalTransition, match="c joins"):
        pools.join("c")
    with pytest.raises(IllegalTransition, match="b is in the pool decode"):
        pools.assign_decode("b", is_prefilling=False)


def test_who_has_nothing_left_of_the_old_kind_changes_pools_at_once() -> None:
    pools = ElasticPools()
    for instance_id in "abcd":
        pools.join(instance_id)
    assert pools.assign_decode("a", is_prefilling=False) is Pool.DECODE
    assert pools.assign_prefill("a", is_decoding=False) is Pool.PREFILL
    assert pools.assign_decode("a", is_prefilling=True) is Pool.PREFILL_TO_DECODE
    assert pools.assign_prefill("b", is_decoding=True) is Pool.DECODE_TO_PREFILL
    with pytest.raises(IllegalTransition, match="instance z: to_prefill, but it is in no pool"):
        pools.assign_prefill("z", is_decoding=False)
