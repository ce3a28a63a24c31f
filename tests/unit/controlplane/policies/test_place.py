"""From a request to an instance, or to an error that says what to do."""

import pytest
from msgspec.structs import replace

from controlplane.model.cluster import ClusterTable
from controlplane.model.instance import InstancePhase, InstanceState, LoadReport
from controlplane.policies.lmetric import LMetric
from controlplane.policies.place import place
from controlplane.policies.registry import create_policy
from mesh.errors import NoInstance, UnknownModel
from tests.unit.controlplane.builders import cache, cluster, instance, report, request


def test_a_placement_tells_its_reasons() -> None:
    table = cluster("a", "b")
    cache(table, "b", 1, 2)
    placement = place(table, LMetric(), request("r", prompt_tokens=40, blocks=(1, 2)))
    assert placement.instance.instance_id == "b"
    assert placement.cached_tokens == 32
    assert (placement.policy, placement.rule) == ("lmetric", LMetric.rule)
    assert placement.request.request_id == "r"
    assert [i.instance_id for i in placement.instances] == ["a", "b"]
    assert placement.decision.indicators["p_token"].tolist() == [40, 8]
    assert placement.excluded == {}


def test_a_placement_counts_at_once_with_its_uncached_tokens() -> None:
    table = cluster("a")
    cache(table, "a", 1, 2)
    place(table, LMetric(), request("r", prompt_tokens=40, blocks=(1, 2)))
    snapshot = table.snapshot("m")
    assert snapshot is not None
    assert snapshot.unreported_prefill_tokens.tolist() == [8]


def test_unknown_models_are_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownModel, match=r"'gpt'; models served: m"):
        place(cluster("a"), LMetric(), request(model="gpt"))
    table = cluster("a")
    table.joined(instance("z", model="another"))
    with pytest.raises(UnknownModel, match=r"'gpt'; models served: another, m$"):
        place(table, LMetric(), request(model="gpt"))
    with pytest.raises(UnknownModel, match=r"models served: none yet$"):
        place(cluster(), LMetric(), request(model="gpt"))


def test_when_nobody_can_take_it_everybodys_reason_is_told() -> None:
    table = cluster("a", "b", "c")
    table.staled("a", "1", True)
    report(table, "b", state=InstanceState.DRAINING)
    with pytest.raises(NoInstance, match=r"a is stale.*b is draining.*c has failed this request before"):
        place(table, LMetric(), request(excluded=frozenset({"c"})))


def test_an_instance_that_the_frontend_cannot_reach_is_not_chosen_and_explain_says_so() -> None:
    table = cluster("a", "b")
    report(table, "b", LoadReport(running_requests=9))
    reached = replace(request(), unreachable_instance_ids=frozenset({"a", "unknown"}))
    placement = place(table, LMetric(), reached)
    assert placement.instance.instance_id == "b"
    assert placement.excluded == {"a": "is not connected to the frontend of this request"}
    with pytest.raises(NoInstance, match=r"a is not connected to the frontend.*b is not connected"):
        place(table, LMetric(), replace(request(), unreachable_instance_ids=frozenset({"a", "b"})))


def test_a_request_is_not_to_be_decoded_where_its_frontend_has_no_connection() -> None:
    table = ClusterTable()
    for name, phase in (("p", InstancePhase.PREFILL), ("d", InstancePhase.DECODE), ("e", InstancePhase.DECODE)):
        table.joined(instance(name, phase=phase))
        report(table, name)
    placement = place(table, LMetric(), replace(request(), unreachable_instance_ids=frozenset({"d"})))
    assert placement.decode_instance.instance_id == "e"


@pytest.mark.parametrize("asks_later", [True, False])
def test_who_decodes_stays_open_where_the_policy_can_be_asked_later(asks_later: bool) -> None:
    table = ClusterTable()
    for name, phase in (("p", InstancePhase.PREFILL), ("d", InstancePhase.DECODE)):
        table.joined(instance(name, phase=phase))
        report(table, name)
    placement = place(table, create_policy("static_pd"), request(), asks_later=asks_later)
    assert (placement.is_decode_open, placement.is_split, placement.decision.decode_row) == (
        (True, False, -1) if asks_later else (False, True, 0)
    )
    assert (placement.decode is None) == asks_later
    short = place(table, create_policy("static_pd"), replace(request("s"), max_tokens=1), asks_later=asks_later)
    assert not short.is_decode_open, "nothing is decoded"
    never = place(table, LMetric(), request("t"), asks_later=asks_later)
    assert (never.is_decode_open, never.is_split) == (False, True), "it decides at once"


def test_the_reasons_of_many_are_cut_short() -> None:
    table = cluster(*(f"i{n}" for n in range(30)))
    for number in range(30):
        report(table, f"i{number}", state=InstanceState.DRAINING)
    with pytest.raises(NoInstance, match="and 22 more"):
        place(table, LMetric(), request())
    for number in range(8, 30):
        table.lost(f"i{number}", "1")
    with pytest.raises(NoInstance, match=r"\(i0 is draining; .*i7 is draining\); retry"):
        place(table, LMetric(), request())


def test_a_model_whose_instances_all_died_is_known_but_not_served() -> None:
    table = cluster("a")
    table.lost("a", "1")
    with pytest.raises(NoInstance, match="every instance of 'm' has gone"):
        place(table, LMetric(), request())
