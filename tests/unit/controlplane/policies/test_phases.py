"""Where prefill and decode go in a fleet with instances for one phase."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, InstanceState, LoadReport
from controlplane.model.placement import Decision, Placement, PlacementProblem, PlacementRequest
from controlplane.policies import phases
from controlplane.policies.interface import Policy
from controlplane.policies.lmetric import LMetric
from controlplane.policies.place import choose_decode, place, place_decode
from controlplane.policies.registry import OWN_POLICIES, create_policy
from controlplane.policies.round_robin import RoundRobin
from tests.examples import examples
from tests.unit.controlplane.builders import instance, report

ANY, PREFILL, DECODE = InstancePhase.ANY, InstancePhase.PREFILL, InstancePhase.DECODE


def fleet(phases_by_id: Mapping[str, InstancePhase], kv_blocks: int = 100) -> ClusterTable:
    table = ClusterTable()
    for instance_id, phase in phases_by_id.items():
        table.joined(instance(instance_id, phase=phase, kv_blocks=kv_blocks))
        report(table, instance_id, LoadReport())
    return table


def put(
    table: ClusterTable,
    request_id: str = "r",
    prompt_tokens: int = 100,
    max_tokens: int = 50,
    is_decoding: bool = False,
    excluded: frozenset[str] = frozenset(),
    policy: Policy | None = None,
) -> Placement:
    asked = PlacementRequest(
        request_id, "m", prompt_tokens, 0.0, (), max_tokens, 0, excluded_instance_ids=excluded, is_decoding=is_decoding
    )
    return place(table, policy or RoundRobin(), asked)


def ids(placement: Placement) -> tuple[str, str]:
    return placement.instance.instance_id, placement.decode_instance.instance_id


def test_prefill_goes_to_one_instance_and_decode_to_another() -> None:
    placement = put(fleet({"d": DECODE, "p": PREFILL}))
    assert ids(placement) == ("p", "d")
    assert placement.is_split
    assert placement.excluded == {"d": "is for decode only"}
    assert placement.decode is not None
    assert placement.decode.rule == phases.RULE


def test_an_instance_that_no_request_can_be_moved_to_decodes_what_it_has() -> None:
    table = fleet({"c": DECODE, "d": DECODE, "p": PREFILL})
    report(table, "c", LoadReport(transfer_obstacle="its network device was made anew"))
    assert {ids(put(table, f"r{number}")) for number in range(6)} == {("p", "d")}
    report(table, "d", LoadReport(transfer_obstacle="its network device was made anew"))
    placement = put(table, "s")
    assert ids(placement) == ("p", "p")
    assert placement.decode is not None
    assert placement.decode.rule == phases.NONE_TO_DECODE
    report(table, "c", LoadReport())
    assert ids(put(table, "t")) == ("p", "c")


def test_where_every_instance_does_both_nothing_is_chosen() -> None:
    placement = put(fleet({"a": ANY, "b": ANY}))
    assert placement.decode is None
    assert not placement.is_split
    assert placement.decode_instance is placement.instance


def test_the_decode_instance_is_the_one_whose_memory_is_emptiest() -> None:
    table = fleet({"d1": DECODE, "p": PREFILL})
    table.joined(instance("d2", phase=DECODE, kv_blocks=1000))
    report(table, "d1", LoadReport(running_requests=1, running_tokens=300))
    report(table, "d2", LoadReport(running_requests=5, running_tokens=2000))
    assert ids(put(table)) == ("p", "d2")


def test_requests_on_their_way_count_until_the_instance_reports_them_or_they_end() -> None:
    table = fleet({"d1": DECODE, "d2": DECODE, "p": PREFILL})
    first, second = put(table, "r1"), put(table, "r2")
    assert {ids(first)[1], ids(second)[1]} == {"d1", "d2"}
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decodes.tolist() == [1, 1, 0]
    assert snapshot.unreported_decode_tokens.tolist() == [100, 100, 0]
    report(table, ids(first)[1], LoadReport(running_requests=1), admitted=("r1",))
    table.ended("r2")
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decodes.tolist() == [0, 0, 0]
    assert snapshot.unreported_decode_tokens.tolist() == [0, 0, 0]


def test_a_report_of_the_prefill_instance_does_not_close_the_decode() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    put(table, "r1")
    report(table, "p", LoadReport(queued_requests=1), admitted=("r1",))
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_requests.tolist() == [0, 0]
    assert snapshot.unreported_decodes.tolist() == [1, 0]


def test_a_decode_that_never_comes_is_forgotten_and_so_is_that_of_a_lost_instance() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    put(table, "r1")
    table.forget_unreported(table.limits.unreported_decode_s + 1)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decodes.tolist() == [0, 0]
    put(table, "r2")
    table.lost("d", "1")
    table.ended("r2")
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decodes.tolist() == [0]


def test_a_request_that_ended_before_it_was_to_come_is_forgotten_soon() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    asked = PlacementRequest("r", "m", 100, 0.0, (), 50)
    chosen = place_decode(table, RoundRobin(), asked, "p")
    assert chosen is not None
    assert chosen.instance_id == "d"
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decode_tokens.tolist() == [100, 0]
    table.forget_unreported(table.limits.arriving_s - 1)
    assert table.expected_requests() == 1
    table.forget_unreported(table.limits.arriving_s + 1)
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decode_tokens.tolist() == [0, 0]
    assert table.expected_requests() == 0


def test_without_a_ready_decode_instance_the_prefill_instance_does_both_and_says_so() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    report(table, "d", LoadReport(), state=InstanceState.DRAINING)
    placement = put(table)
    assert ids(placement) == ("p", "p")
    assert placement.decode is not None
    assert placement.decode.rule == phases.NONE_TO_DECODE


def test_without_a_ready_prefill_instance_a_decode_instance_does_both() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    table.lost("p", "1")
    assert ids(put(table)) == ("d", "d")


def test_one_token_is_not_decoded_elsewhere() -> None:
    placement = put(fleet({"d": DECODE, "p": PREFILL}), max_tokens=1)
    assert ids(placement) == ("p", "p")
    assert placement.decode is not None
    assert placement.decode.rule == phases.ONE_TOKEN


def test_a_request_that_decodes_already_goes_where_requests_are_decoded() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    placement = put(table, is_decoding=True)
    assert ids(placement) == ("d", "d")
    assert placement.decode is not None
    assert placement.decode.rule == phases.DECODES_ALREADY
    assert ids(put(table, is_decoding=True, excluded=frozenset(("d",)))) == ("p", "p")


def test_the_instance_of_the_prefill_decodes_where_none_is_emptier() -> None:
    table = fleet({"a": ANY, "d": DECODE})
    placement = put(table)
    assert ids(placement) == ("a", "a")
    report(table, "a", LoadReport(running_requests=1, running_tokens=500), admitted=("r",))
    assert ids(put(table, "r2")) == ("a", "d")


class ChoosesBoth(LMetric):
    """Decodes on the last candidate."""

    def decide(self, problem: PlacementProblem) -> Decision:
        assert problem.decode_candidates is not None
        return Decision(0, super().decide(problem).scores, {}, len(problem.snapshot) - 1)


def test_a_policy_that_chooses_both_has_its_way() -> None:
    table = fleet({"a": ANY, "b": ANY, "c": ANY})
    placement = put(table, policy=ChoosesBoth())
    assert ids(placement) == ("a", "c")
    assert placement.decode is not None
    assert placement.decode.rule == phases.BY_POLICY
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_decodes.tolist() == [0, 0, 1]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(50))
@pytest.mark.parametrize("name", OWN_POLICIES)
@given(
    phase_of=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(InstancePhase), min_size=1),
    is_decoding=st.booleans(),
    max_tokens=st.integers(0, 3),
)
def test_every_policy_respects_the_phases(
    name: str, phase_of: dict[str, InstancePhase], is_decoding: bool, max_tokens: int
) -> None:
    placement = put(fleet(phase_of), is_decoding=is_decoding, max_tokens=max_tokens, policy=create_policy(name))
    first, last = placement.instance.phase, placement.decode_instance.phase
    if is_decoding:
        assert first.decodes or not any(phase.decodes for phase in phase_of.values())
    else:
        assert first.prefills or not any(phase.prefills for phase in phase_of.values())
    if is_decoding or max_tokens == 1:
        assert not placement.is_split
    elif name != "arrow":
        assert last.decodes or not any(phase.decodes for phase in phase_of.values())


def late(table: ClusterTable, request_id: str = "r", prefilled_on: str = "p", max_tokens: int = 50) -> str | None:
    asked = PlacementRequest(request_id, "m", 100, 0.0, (), max_tokens)
    chosen = place_decode(table, RoundRobin(), asked, prefilled_on)
    return None if chosen is None else chosen.instance_id


def test_at_the_end_of_a_prefill_there_is_nothing_to_choose_for_who_is_not_known_or_ends_with_it() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    assert late(table, prefilled_on="gone") is None
    assert late(table, max_tokens=1) is None
    assert late(ClusterTable()) is None
    assert late(table) == "d"


def test_at_the_end_of_a_prefill_a_request_stays_where_all_do_both_or_nobody_can_take_it() -> None:
    table = fleet({"a": ANY, "b": ANY})
    assert late(table, prefilled_on="a") is None
    snapshot = table.snapshot("m")
    assert snapshot is not None
    asked = PlacementRequest("r", "m", 100, 0.0, (), 50)
    chosen = choose_decode(table, RoundRobin(), asked, "b")
    assert chosen is not None
    assert (chosen[1].row, chosen[1].rule) == (1, phases.STAYS)
    table = fleet({"d": DECODE, "p": PREFILL})
    report(table, "d", LoadReport(transfer_obstacle="its network device was made anew"))
    assert late(table) is None


def test_what_is_chosen_at_the_end_of_a_prefill_counts_until_its_request_ends() -> None:
    table = fleet({"d": DECODE, "p": PREFILL})
    assert late(table, "r7") == "d"
    assert table.expected_requests() == 1
    assert table.ended("r7") == ("d",)
    assert table.expected_requests() == 0
