"""The fixed split that Arrow is compared with, and both phases on one instance, by hand: of four, a and b prefill."""

from math import inf

import pytest

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, LoadReport
from controlplane.model.placement import Placement, PlacementRequest
from controlplane.policies.arrow.static_split import prefill_rows
from controlplane.policies.interface import Policy
from controlplane.policies.place import choose_decode, place
from controlplane.policies.registry import create_policy
from tests.unit.controlplane.builders import cache, cluster, instance, report

CURVE = {"prefill_fixed_ms": 0.0, "prefill_token_ms": 1.0, "prefill_token_squared_ms": 0.0}
"""A token takes a millisecond."""
STATIC = ["static_pd", "static_pd_round_robin"]


def split(name: str, prefill_instances: int = 0) -> Policy:
    return create_policy(name, {**CURVE, "prefill_instances": prefill_instances})


def put(table: ClusterTable, policy: Policy, request_id: str = "r", tokens: int = 100, **about: object) -> Placement:
    wanted = PlacementRequest(request_id, "m", tokens, 0.0, max_tokens=50, **about)  # type: ignore[arg-type]
    return place(table, policy, wanted)


def ids(placement: Placement) -> str:
    return placement.instance.instance_id + placement.decode_instance.instance_id


def queued(tokens: int) -> LoadReport:
    return LoadReport(queued_requests=1, queued_prefill_tokens=tokens)


def decoding(tokens: int) -> LoadReport:
    return LoadReport(running_requests=1, running_tokens=tokens)


@pytest.mark.parametrize(
    ("instances", "wanted", "prefill"),
    [
        ("abcd", 0, "ab"),
        ("abc", 0, "ab"),
        ("abc", 1, "a"),
        ("abc", 3, "ab"),
        ("abc", 9, "ab"),
        ("a", 0, "a"),
        ("ab", 2, "a"),
    ],
)
def test_the_first_instances_prefill_and_one_at_least_decodes(instances: str, wanted: int, prefill: str) -> None:
    snapshot = cluster(*instances).snapshot("m")
    assert snapshot is not None
    assert "".join(each for each, row in zip(instances, prefill_rows(snapshot, wanted), strict=True) if row) == prefill


@pytest.mark.parametrize(("wanted", "prefill"), [(0, "bc"), (1, "c"), (2, "bc"), (3, "bc")])
def test_instances_that_are_set_aside_keep_to_their_phase(wanted: int, prefill: str) -> None:
    table = ClusterTable()
    for name, phase in (("a", InstancePhase.DECODE), ("b", InstancePhase.ANY), ("c", InstancePhase.PREFILL)):
        table.joined(instance(name, phase=phase))
        report(table, name)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert "".join(each for each, row in zip("abc", prefill_rows(snapshot, wanted), strict=True) if row) == prefill


def test_prefill_goes_where_the_delay_is_least_and_decode_where_the_fewest_tokens_run() -> None:
    table, policy = cluster("a", "b", "c", "d"), split("static_pd")
    report(table, "a", queued(30))
    report(table, "c", decoding(500))
    report(table, "d", decoding(400))
    placement = put(table, policy)
    assert ids(placement) == "bd"
    assert placement.decision.scores.tolist() == [130.0, 100.0, 100.0, 100.0]
    assert placement.decode is not None
    assert placement.decode.scores is not None
    assert placement.decode.scores.tolist() == [inf, inf, 500, 400]
    assert ids(put(table, policy, "r1")) == "ac", "the first one's prompt and tokens count"


def test_equal_delays_are_decided_by_what_is_cached() -> None:
    table, policy = cluster("a", "b", "c"), split("static_pd")
    cache(table, "b", 1, 2)
    for number in range(3):
        placement = put(table, policy, f"r{number}", block_hashes=(1, 2))
        assert placement.instance.instance_id == "b"
        table.ended(f"r{number}")


@pytest.mark.parametrize("name", STATIC)
def test_a_request_that_decodes_already_goes_to_those_that_decode(name: str) -> None:
    table, policy = cluster("a", "b", "c", "d"), split(name)
    report(table, "c", queued(30))
    chosen = [put(table, policy, f"r{number}", is_decoding=True) for number in range(2)]
    assert all(not each.is_split for each in chosen)
    expected = ["d", "c"] if name == "static_pd" else ["c", "d"]
    assert [each.instance.instance_id for each in chosen] == expected


@pytest.mark.parametrize("name", STATIC)
def test_where_none_of_the_kind_may_be_taken_another_serves(name: str) -> None:
    table, policy = cluster("a", "b", "c", "d"), split(name)
    assert ids(put(table, policy, excluded_instance_ids=frozenset("ab"))) in ("cc", "dd", "cd", "dc")
    placement = put(table, policy, "s", excluded_instance_ids=frozenset("cd"))
    assert ids(placement) in ("aa", "bb")
    assert put(table, policy, "t", is_decoding=True, excluded_instance_ids=frozenset("cd")).instance.instance_id in "ab"


def test_both_kinds_are_dealt_out_in_turn_whatever_their_load() -> None:
    table, policy = cluster("a", "b", "c", "d"), split("static_pd_round_robin")
    report(table, "a", queued(3000))
    placements = [put(table, policy, f"r{number}") for number in range(4)]
    assert [ids(each) for each in placements] == ["ac", "bd", "ac", "bd"]
    assert placements[0].decision.scores.tolist() == [0, 1, inf, inf]
    assert placements[0].decode is not None
    assert placements[0].decode.scores is not None
    assert placements[0].decode.scores.tolist() == [inf, inf, 0, 1]


def test_models_that_come_in_turn_have_turns_of_their_own() -> None:
    policy, chosen = split("static_pd_round_robin"), {"m": "", "n": ""}
    table = ClusterTable()
    for model in chosen:
        for name in "abcd":
            table.joined(instance(model + name, model=model))
            report(table, model + name)
    for number in range(2):
        for model in chosen:
            wanted = PlacementRequest(f"{model}{number}", model, 100, 0.0, max_tokens=50)
            placement = place(table, policy, wanted)
            chosen[model] += placement.instance.instance_id[1] + placement.decode_instance.instance_id[1]
    assert chosen == {"m": "acbd", "n": "acbd"}


@pytest.mark.parametrize("name", STATIC)
def test_the_end_of_a_prefill_is_asked_about_among_those_that_decode(name: str) -> None:
    table, policy = cluster("a", "b", "c", "d"), split(name)
    report(table, "c", LoadReport(transfer_obstacle="its network device was made anew"))
    wanted = PlacementRequest("r", "m", 100, 0.0, max_tokens=50)
    late = place(table, policy, wanted, asks_later=True)
    assert (late.decision.decode_row, late.is_split) == (-1, False)
    chosen = choose_decode(table, policy, wanted, "a")
    assert chosen is not None
    assert (chosen[1].row, chosen[1].rule) == (3, policy.rule)
    report(table, "d", LoadReport(transfer_obstacle="its network device was made anew"))
    chosen = choose_decode(table, policy, wanted, "a")
    assert chosen is not None
    assert (chosen[1].row, chosen[1].rule, chosen[1].scores) == (0, policy.rule, None)


def test_as_many_prefill_as_are_asked_for_each_in_its_turn() -> None:
    table, policy = cluster("a", "b", "c", "d"), split("static_pd_round_robin", prefill_instances=3)
    assert [ids(put(table, policy, f"r{number}")) for number in range(4)] == ["ad", "bd", "cd", "ad"]
    table, policy = cluster("a", "b", "c", "d"), split("static_pd", prefill_instances=1)
    assert {put(table, policy, f"r{number}").instance.instance_id for number in range(3)} == {"a"}


def test_idle_instances_decode_in_turn() -> None:
    table, policy, decoders = cluster("a", "b", "c", "d"), split("static_pd"), set[str]()
    for number in range(4):
        decoders.add(put(table, policy, f"r{number}").decode_instance.instance_id)
        table.ended(f"r{number}")
    assert decoders == {"c", "d"}


def test_a_prompt_takes_the_longer_the_more_there_is_to_attend_to() -> None:
    """68 tokens of 100 beside 32 cached ones: 5 + 68 + 0.01 x (100^2 - 32^2) ms; all 100: 5 + 100 + 0.01 x 100^2."""
    curve = {"prefill_fixed_ms": 5.0, "prefill_token_ms": 1.0, "prefill_token_squared_ms": 0.01}
    table, policy = cluster("a", "b"), create_policy("colocated", curve)
    cache(table, "b", 1, 2)
    first = put(table, policy, block_hashes=(1, 2))
    assert first.instance.instance_id == "b"
    assert first.decision.scores.tolist() == pytest.approx([205.0, 162.76])
    assert put(table, policy, "r1").decision.indicators["prefill_delay_ms"].tolist() == [0, 163], "it is remembered"


def test_both_phases_on_one_instance_go_where_the_delay_is_least_then_where_the_fewest_tokens_run() -> None:
    table, policy = cluster("a", "b", "c"), create_policy("colocated", CURVE)
    report(table, "a", queued(30))
    report(table, "b", decoding(500))
    report(table, "c", decoding(400))
    placement = put(table, policy)
    assert ids(placement) == "cc"
    assert placement.decision.scores.tolist() == [130.0, 100.0, 100.0]
    assert ids(put(table, policy, "r1")) == "bb", "c has a prompt to compute"
    assert ids(put(table, policy, "r2")) == "aa"
