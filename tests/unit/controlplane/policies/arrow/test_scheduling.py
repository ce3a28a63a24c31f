"""Arrow's four algorithms and its monitor, line by line, over four instances: a and c prefill, b and d decode."""

from collections.abc import Mapping
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, InstanceState, LoadReport
from controlplane.model.placement import PlacementRequest
from controlplane.model.step_costs import StepCosts
from controlplane.policies.arrow.instances import ElasticInstances
from controlplane.policies.arrow.parameters import ArrowParameters
from controlplane.policies.arrow.policy import DECODE_RULE, Arrow
from controlplane.policies.arrow.pools import Pool
from controlplane.policies.place import choose_decode, place, place_decode
from tests.examples import examples
from tests.unit.controlplane.builders import BLOCK_TOKENS, cache, cluster, instance, report

KV_TOKENS = 1000 * BLOCK_TOKENS
PARAMETERS = ArrowParameters(
    ttft_ms=1000,
    tpot_ms=50,
    max_running_tokens=10_000,
    low_load=0.5,
    trigger_s=1.0,
    prefill_fixed_ms=0,
    prefill_token_ms=1.0,
    prefill_token_squared_ms=0,
)
"""A token takes a millisecond."""


def idle() -> tuple[ClusterTable, Arrow]:
    table, policy = cluster("a", "b", "c", "d"), Arrow(PARAMETERS)
    observe(table, policy, 0.0)
    assert policy.pools("another") == {}
    assert (
        policy.pools("m") == pools(policy) == {"a": Pool.PREFILL, "b": Pool.DECODE, "c": Pool.PREFILL, "d": Pool.DECODE}
    )
    return table, policy


def observe(table: ClusterTable, policy: Arrow, now_s: float) -> None:
    snapshot = table.snapshot("m")
    assert snapshot is not None
    policy.observe(snapshot, now_s)


def inside(policy: Arrow) -> ElasticInstances:
    return policy._models["m"][0]


def pools(policy: Arrow) -> Mapping[str, Pool]:
    known = inside(policy).pools
    return {instance_id: known[instance_id] for instance_id in known}


def ask(table: ClusterTable, policy: Arrow, request_id: str, tokens: int, **about: bool) -> str:
    wanted = PlacementRequest(request_id, "m", tokens, 0.0, max_tokens=50, **about)  # type: ignore[arg-type]
    return place(table, policy, wanted, asks_later=True).instance.instance_id


def ask_decode(table: ClusterTable, policy: Arrow, request_id: str, prefilled_on: str, tokens: int = 100) -> str:
    wanted = PlacementRequest(request_id, "m", tokens, 0.0, max_tokens=50)
    chosen = place_decode(table, policy, wanted, prefilled_on)
    return prefilled_on if chosen is None else chosen.instance_id


def decoding(tokens: int, interval_ms: float = 20.0) -> LoadReport:
    return LoadReport(running_requests=1, running_tokens=tokens, decoding_requests=1, token_interval_ms=interval_ms)


def queued(tokens: int) -> LoadReport:
    return LoadReport(queued_requests=1, queued_prefill_tokens=tokens)


# -- Algorithm 1


def test_a_prompt_goes_to_the_prefill_instance_with_the_least_delay() -> None:
    table, policy = idle()
    report(table, "a", queued(300))
    report(table, "c", queued(200))
    assert ask(table, policy, "r0", 400) == "c"
    assert ask(table, policy, "r1", 400) == "a"


def test_among_those_with_equal_delays_the_longest_cached_prefix_decides() -> None:
    table, policy = idle()
    cache(table, "c", 1, 2)
    for number in range(3):
        wanted = PlacementRequest(f"r{number}", "m", 100, 0.0, (1, 2), max_tokens=50)
        assert place(table, policy, wanted, asks_later=True).instance.instance_id == "c"
        table.ended(f"r{number}")


def test_only_a_prompt_that_the_prefill_instances_would_delay_too_long_goes_to_one_in_transition() -> None:
    table, policy = idle()
    report(table, "b", decoding(3000))
    report(table, "d", decoding(2000))
    for each in "ac":
        report(table, each, queued(900))
    # Nobody keeps the TTFT: the decode instance with the fewest running tokens is moved.
    assert ask(table, policy, "r0", 200) == "d"
    assert pools(policy)["d"] is Pool.DECODE_TO_PREFILL
    assert ask(table, policy, "r1", 90) in "ac"
    assert ask(table, policy, "r2", 200) == "d"


def test_decode_load_that_is_not_low_keeps_its_instances() -> None:
    table, policy = idle()
    for each in "ac":
        report(table, each, queued(900))
    for each in "bd":
        report(table, each, decoding(5001))
    assert ask(table, policy, "r0", 200) in "ac"
    assert pools(policy)["b"] is pools(policy)["d"] is Pool.DECODE


def test_the_last_decode_instance_stays() -> None:
    table, policy = idle()
    for number in range(20):
        chosen = ask(table, policy, f"r{number}", 900)
    assert sorted(pools(policy).values()) == [Pool.DECODE, Pool.PREFILL, Pool.PREFILL, Pool.PREFILL]
    assert pools(policy)[chosen] is Pool.PREFILL


def test_an_instance_moved_without_decode_work_is_for_prefill_at_once() -> None:
    table, policy = idle()
    for each in "ac":
        report(table, each, queued(900))
    moved = ask(table, policy, "r0", 200)
    assert moved in "bd"
    assert pools(policy)[moved] is Pool.PREFILL


# -- Algorithm 2


def test_a_decode_goes_to_the_decode_instance_with_the_fewest_running_tokens() -> None:
    table, policy = idle()
    report(table, "b", decoding(500))
    report(table, "d", decoding(400))
    assert ask_decode(table, policy, "r0", "a", 200) == "d"
    # It is on its way there, and counts.
    assert ask_decode(table, policy, "r1", "a", 200) == "b"


def test_a_prompt_computed_where_decoding_has_begun_stays_there() -> None:
    table, policy = idle()
    report(table, "a", queued(100))
    inside(policy).look(table.snapshot("m"))  # type: ignore[arg-type]
    assert inside(policy).pools.assign_decode("a", is_prefilling=True) is Pool.PREFILL_TO_DECODE
    report(table, "b", decoding(10))
    assert ask_decode(table, policy, "r0", "a") == "a"


@pytest.mark.parametrize("load", [decoding(10_001), decoding(100, interval_ms=51.0)])
def test_full_or_slow_decode_instances_get_help_from_the_least_loaded_prefill_instance(load: LoadReport) -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, load)
    report(table, "a", queued(300))
    report(table, "c", queued(200))
    assert ask_decode(table, policy, "r0", "a") == "c"
    assert pools(policy)["c"] is Pool.PREFILL_TO_DECODE
    # The last prefill instance stays; the one in transition takes what it can.
    assert ask_decode(table, policy, "r1", "a") == "c"
    assert pools(policy)["a"] is Pool.PREFILL


def test_when_all_is_full_the_fewest_running_tokens_win() -> None:
    table, policy = idle()
    report(table, "b", decoding(12_000))
    report(table, "d", decoding(11_000))
    report(table, "a", queued(300))
    report(table, "c", LoadReport(1, 1, 200, running_tokens=15_000, decoding_requests=1, token_interval_ms=80))
    assert ask_decode(table, policy, "r0", "a") == "c"
    report(table, "c", LoadReport(1, 1, 200, running_tokens=15_000, decoding_requests=1, token_interval_ms=80))
    assert ask_decode(table, policy, "r1", "a") == "d"


def test_without_a_later_question_both_are_chosen_at_once() -> None:
    table, policy = idle()
    report(table, "b", decoding(10))
    wanted = PlacementRequest("r", "m", 100, 0.0, max_tokens=50)
    placement = place(table, policy, wanted)
    assert (placement.instance.instance_id in "ac", placement.decode_instance.instance_id) == (True, "d")
    assert place(table, policy, PlacementRequest("s", "m", 100, 0.0, max_tokens=1)).is_split is False


def test_a_prompt_that_goes_to_an_instance_for_decoding_is_decoded_there() -> None:
    table, policy = idle()
    report(table, "b", decoding(5500))
    report(table, "d", LoadReport(1, 1, 100, running_tokens=5000, decoding_requests=1))
    wanted = PlacementRequest("r", "m", 100, 0.0, max_tokens=50, excluded_instance_ids=frozenset("ac"))
    placement = place(table, policy, wanted)
    assert (placement.instance.instance_id, placement.decode_instance.instance_id) == ("b", "b"), "d has fewer tokens"


def test_nothing_is_decoded_where_no_request_can_be_moved_to() -> None:
    table, policy = idle()
    report(table, "b", LoadReport(transfer_obstacle="its network device was made anew"))
    report(table, "d", decoding(500))
    placement = place(table, policy, PlacementRequest("r", "m", 100, 0.0, max_tokens=50))
    assert placement.decode_instance.instance_id == "d"
    assert placement.decode is not None
    assert placement.decode.scores is not None
    assert placement.decode.scores.tolist() == [0, inf, 0, 500]
    for each in "acd":
        report(table, each, LoadReport(transfer_obstacle="its network device was made anew"))
    chosen = choose_decode(table, policy, PlacementRequest("s", "m", 100, 0.0, max_tokens=50), "a")
    assert chosen is not None
    assert (chosen[1].row, chosen[1].rule, chosen[1].scores) == (0, DECODE_RULE, None)


def test_where_only_a_full_instance_in_transition_can_decode_it_does() -> None:
    table, policy = idle()
    report(table, "a", queued(100))
    inside(policy).look(table.snapshot("m"))  # type: ignore[arg-type]
    inside(policy).pools.assign_decode("a", is_prefilling=True)
    report(table, "a", LoadReport(1, 1, 100, running_tokens=12_000, decoding_requests=1, token_interval_ms=20))
    report(table, "c", queued(100))
    excluded = frozenset("bd")
    wanted = PlacementRequest("r", "m", 100, 0.0, max_tokens=50, excluded_instance_ids=excluded)
    chosen = place_decode(table, policy, wanted, "c")
    assert chosen is not None
    assert chosen.instance_id == "a", "and c, the last one for prefill, stays so"


def test_one_placement_that_is_not_reported_yet_is_prefill_work() -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, decoding(6000))
    assert ask(table, policy, "r", 100) in "ac"
    ask_decode(table, policy, "of another prompt", "b")
    lent = [each for each in "ac" if pools(policy)[each].decodes]
    busy = [each for each in "ac" if table.snapshot("m").unreported_requests["abcd".index(each)]]  # type: ignore[union-attr]
    assert (len(lent), len(busy)) == (1, 1)
    assert lent != busy


def test_a_request_that_decodes_already_goes_where_requests_are_decoded() -> None:
    table, policy = idle()
    report(table, "b", decoding(10))
    assert ask(table, policy, "r", 100, is_decoding=True) == "d"
    table, policy = idle()
    chosen = set()
    for number in range(4):
        wanted = PlacementRequest(f"r{number}", "m", 100, 0.0, max_tokens=50, is_decoding=True)
        placement = place(table, policy, wanted)
        assert placement.decision.indicators["pool"].tolist() == [0, 1, 0, 1]
        chosen.add(placement.instance.instance_id)
        table.ended(f"r{number}")
    assert chosen == {"b", "d"}, "in turn while all are idle"


# -- the pools in time


def test_each_instance_is_predicted_by_its_own_profile() -> None:
    table, policy = idle()
    slow = StepCosts(fixed_ms=0.0, prefill_token_ms=1.0, attended_pair_ms=0.0)
    for each, factor in (("a", 1.0), ("c", 0.25)):
        table.costed(each, "1", msgspec.structs.replace(slow, prefill_token_ms=factor))
        report(table, each, queued(800))
    observe(table, policy, 0.0)
    delays_ms = dict(zip("abcd", inside(policy).loads.prefill_delay_ms.tolist(), strict=True))
    assert (delays_ms["a"], delays_ms["c"]) == (800, 200), "the parameters' curve is that of the slowest"
    placed = place(table, policy, PlacementRequest("r0", "m", 400, 0.0, max_tokens=50), asks_later=True)
    assert (placed.instance.instance_id, placed.decision.scores[2]) == ("c", 300)
    table.costed("c", "1", slow)
    observe(table, policy, 1.0)
    assert inside(policy).loads.prefill_delay_ms[2] == 1200, "800 reported, 400 placed"


def test_an_instance_leaves_its_transition_once_the_old_work_is_done() -> None:
    table, policy = idle()
    report(table, "b", decoding(3000))
    report(table, "d", decoding(2000))
    for each in "ac":
        report(table, each, queued(900))
    ask(table, policy, "r0", 200)
    observe(table, policy, 1.0)
    assert pools(policy)["d"] is Pool.DECODE_TO_PREFILL
    report(table, "d", queued(200), admitted=("r0",))
    observe(table, policy, 2.0)
    assert pools(policy)["d"] is Pool.PREFILL


def test_intervals_above_the_tpot_move_an_instance_after_a_while_and_not_two_at_once() -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, decoding(100, interval_ms=60.0))
    for each in "ac":
        report(table, each, queued(500 if each == "a" else 100))
    for now_s, decoders in ((0.0, 2), (0.9, 2), (1.0, 3), (1.5, 3), (2.5, 3)):
        observe(table, policy, now_s)
        assert sum(pool.decodes for pool in pools(policy).values()) == decoders
    assert pools(policy)["c"] is Pool.PREFILL_TO_DECODE
    assert pools(policy)["a"] is Pool.PREFILL


def test_intervals_that_are_above_the_tpot_at_the_first_look_count_from_there() -> None:
    table, policy = cluster("a", "b", "c", "d"), Arrow(PARAMETERS)
    for each in "bd":
        report(table, each, decoding(100, interval_ms=60.0))
    for now_s, decoders in ((10.0, 2), (10.9, 2), (11.0, 3)):
        observe(table, policy, now_s)
        assert sum(pool.decodes for pool in pools(policy).values()) == decoders


def test_intervals_that_an_instance_told_before_it_fell_silent_move_nothing() -> None:
    table, policy = idle()
    report(table, "b", decoding(100, interval_ms=500.0))
    table.staled("b", "1", True)
    for quarter in range(1, 20):
        observe(table, policy, quarter / 4)
    assert pools(policy) == {"a": Pool.PREFILL, "b": Pool.DECODE, "c": Pool.PREFILL, "d": Pool.DECODE}


def test_a_short_rise_of_intervals_moves_nothing() -> None:
    table, policy = idle()
    for each in "ac":
        report(table, each, queued(100))
    for now_s, interval_ms in ((0.0, 60.0), (0.9, 40.0), (1.2, 60.0), (2.0, 60.0)):
        for each in "bd":
            report(table, each, decoding(100, interval_ms))
        observe(table, policy, now_s)
    assert sum(pool.decodes for pool in pools(policy).values()) == 2


def test_at_the_end_of_a_prefill_an_idle_instance_helps_busy_decoding_but_one_stays() -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, decoding(6000))
    observe(table, policy, 1.0)
    assert sum(pool.decodes for pool in pools(policy).values()) == 2, "no prefill has ended"
    assert ask_decode(table, policy, "r0", "a") == "a", "it was the last of its prompts, and a is lent"
    assert pools(policy)["a"] is Pool.DECODE
    # With the third, 12,000 of 30,000 tokens are low again.
    ask_decode(table, policy, "r1", "c")
    assert sum(pool.prefills for pool in pools(policy).values()) == 1


def test_an_instance_that_stays_idle_while_decoding_is_busy_is_lent_in_time() -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, decoding(6000))
    for now_s, decoders in ((1.0, 2), (1.9, 2), (2.0, 3), (4.0, 3)):
        observe(table, policy, now_s)
        assert sum(pool.decodes for pool in pools(policy).values()) == decoders, "one stays for prefill"


def test_busy_prefill_instances_are_not_lent() -> None:
    table, policy = idle()
    for each in "bd":
        report(table, each, decoding(6000))
    for each in "ac":
        report(table, each, queued(10))
    ask_decode(table, policy, "r0", "a")
    assert sum(pool.decodes for pool in pools(policy).values()) == 2


def test_another_schedulers_pools_are_gone_on_with() -> None:
    table, former = idle()
    report(table, "b", decoding(6000))
    report(table, "d", decoding(6000))
    ask_decode(table, former, "r0", "a")
    policy = Arrow(PARAMETERS)
    policy.resume("m", {**former.pools("m"), "gone": "prefill", "b": "a pool of another release"})
    table.joined(instance("e"))
    report(table, "e")
    observe(table, policy, 0.0)
    assert {each: pools(policy)[each] for each in "acd"} == {each: former.pools("m")[each] for each in "acd"}
    assert policy.pools("m").keys() == set("abcde"), "who has gone is in no pool"
    assert [pools(policy)[each] for each in "be"] == [Pool.PREFILL, Pool.PREFILL], "the others make both kinds even"


def test_the_last_of_a_kind_that_leaves_is_made_up_for() -> None:
    table, policy = idle()
    for each in "ac":
        table.lost(each, "1")
    observe(table, policy, 1.0)
    assert sorted(pools(policy).values()) == [Pool.DECODE, Pool.PREFILL]


def test_a_single_instance_does_both() -> None:
    table, policy = cluster("a"), Arrow(PARAMETERS)
    assert ask(table, policy, "r", 5000) == "a"
    assert ask_decode(table, policy, "r", "a") == "a"


def test_instances_set_aside_keep_to_their_phase() -> None:
    table, policy = ClusterTable(), Arrow(PARAMETERS)
    wishes = {"a": InstancePhase.DECODE, "b": InstancePhase.ANY, "c": InstancePhase.PREFILL}
    for instance_id, phase in wishes.items():
        table.joined(instance(instance_id, phase=phase))
        report(table, instance_id)
    for number in range(10):
        assert ask(table, policy, f"r{number}", 900) in "bc"
        assert ask_decode(table, policy, f"r{number}", "c") in "ab"
    assert pools(policy)["a"] is Pool.DECODE
    assert pools(policy)["c"] is Pool.PREFILL


# -- whatever happens

IDS = "abcd"
LOADS = st.builds(
    LoadReport,
    running_requests=st.integers(0, 5),
    queued_requests=st.integers(0, 5),
    queued_prefill_tokens=st.integers(0, 3000),
    running_tokens=st.integers(0, 20_000),
    decoding_requests=st.integers(0, 5),
    token_interval_ms=st.floats(0, 100),
)
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from(IDS), LOADS),
        st.tuples(st.just("lost"), st.sampled_from(IDS), st.none()),
        st.tuples(st.just("back"), st.sampled_from(IDS), st.sampled_from(InstancePhase)),
        st.tuples(st.just("stale"), st.sampled_from(IDS), st.booleans()),
        st.tuples(st.just("place"), st.sampled_from(IDS), st.integers(1, 3000)),
        st.tuples(st.just("decode"), st.sampled_from(IDS), st.integers(1, 3000)),
        st.tuples(st.just("recover"), st.sampled_from(IDS), st.integers(1, 3000)),
        st.tuples(st.just("observe"), st.sampled_from(IDS), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=examples(200), deadline=None)
@given(HAPPENINGS)
def test_both_kinds_are_always_served_and_every_choice_is_a_candidate(
    happenings: list[tuple[str, str, object]],
) -> None:
    table, policy = cluster(*IDS), Arrow(PARAMETERS)
    there = dict.fromkeys(IDS, InstancePhase.ANY)
    for number, (what, each, value) in enumerate(happenings):
        _happen(table, policy, there, (what, each, value), number)
        known = pools(policy) if "m" in policy._models else {}
        elastic = [each for each, phase in there.items() if phase is InstancePhase.ANY]
        if what in ("place", "decode", "recover", "observe") and set(known) == set(there) and len(elastic) >= 2:
            assert any(pool.prefills for pool in known.values())
            assert any(pool.decodes for pool in known.values())
        for pinned, phase in there.items():
            if known.get(pinned) is not None and phase is not InstancePhase.ANY and set(known) == set(there):
                assert known[pinned] is Pool(phase)


def _happen(
    table: ClusterTable,
    policy: Arrow,
    there: dict[str, InstancePhase],
    happening: tuple[str, str, object],
    number: int,
) -> None:
    what, each, value = happening
    ready = table.snapshot("m").placeable.any()  # type: ignore[union-attr]
    match what, value:
        case "back", InstancePhase() if each not in there:
            table.joined(instance(each, phase=value))
            table.reported(each, "1", LoadReport(), InstanceState.READY)
            there[each] = value
            observe(table, policy, number / 4)
        case "lost", _ if each in there and len(there) > 1:
            table.lost(each, "1")
            del there[each]
        case "report", LoadReport() if each in there:
            report(table, each, value)
        case "stale", bool() if each in there:
            table.staled(each, "1", value)
        case "place", int() if ready:
            assert ask(table, policy, f"r{number}", value) in there
        case "recover", int() if ready:
            assert ask(table, policy, f"r{number}", value, is_decoding=True) in there
        case "decode", int() if each in there:
            assert ask_decode(table, policy, f"r{number}", each, value) in there
        case "observe", _:
            observe(table, policy, number / 4)
