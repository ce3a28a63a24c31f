"""Requests that have ended and that the last report of their instance counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.model.counted_requests import CountedRequests
from controlplane.model.instance import LoadReport
from controlplane.policies.place import place
from controlplane.policies.registry import create_policy
from tests.unit.controlplane.builders import cache, cluster, instance, report, request

BUSY = LoadReport(
    running_requests=4,
    queued_requests=1,
    queued_prefill_tokens=900,
    running_tokens=2000,
    kv_blocks_used=120,
    decoding_requests=3,
)


def counted(table: ClusterTable) -> tuple[int, ...]:
    """What is believed of instance a: requests that run, wait and decode, tokens of context and of prompts that wait,
    KV blocks."""
    table.validate()
    snapshot = table.snapshot("m")
    assert snapshot is not None
    columns = (
        snapshot.running_requests,
        snapshot.queued_requests,
        snapshot.decoding_requests,
        snapshot.running_tokens,
        snapshot.queued_prefill_tokens,
        snapshot.kv_blocks_used,
    )
    return tuple(int(column[0]) for column in columns)


@pytest.mark.parametrize("policy", ["penstock", "lmetric", "lmetric_plus", "linear"])
def test_an_agent_that_asks_again_at_once_goes_back_to_its_prefix(policy: str) -> None:
    table = cluster("a", "b")
    table.placed("r1", "b", 1600, now_s=0.0)
    # The last report of b was sent when the prompt had just come.
    report(table, "b", LoadReport(queued_requests=1, queued_prefill_tokens=1600), admitted=("r1",))
    cache(table, "b", *range(1, 101))
    table.ended("r1")
    again = request("r2", 1610, tuple(range(1, 101)), now_s=0.02)
    assert place(table, create_policy(policy), again).instance.instance_id == "b"
    view = table.snapshot("m")
    assert view is not None
    assert view.batch_requests.tolist() == [0, 1]
    assert view.pending_prefill_tokens.tolist() == [0, 10]


def test_a_request_that_runs_takes_the_mean_of_those_there_with_it() -> None:
    table = cluster("a", "b")
    report(table, "a", admitted=("r",))
    report(table, "a", BUSY)
    table.ended("r")
    assert counted(table) == (3, 1, 2, 1500, 900, 90)
    table.ended("r")
    assert counted(table) == (3, 1, 2, 1500, 900, 90), "it ends once"
    report(table, "a", BUSY)
    assert counted(table) == (4, 1, 3, 2000, 900, 120), "the next report says all"


def test_a_request_that_the_last_report_admitted_takes_its_prompt_with_it() -> None:
    table = cluster("a")
    table.placed("r", "a", 700, now_s=0.0)
    report(table, "a", BUSY, admitted=("r",))
    table.ended("r")
    assert counted(table) == (4, 0, 3, 2000, 200, 120)


def test_a_prompt_that_was_placed_before_the_last_report_is_computed_by_now_for_all_that_is_known() -> None:
    table = cluster("a")
    table.placed("r", "a", 700, now_s=0.0)
    report(table, "a", LoadReport(queued_requests=1, queued_prefill_tokens=700), admitted=("r",))
    report(table, "a", BUSY)
    table.ended("r")
    assert counted(table) == (3, 1, 2, 1500, 900, 90), "the 900 tokens are others'"


def test_the_last_request_leaves_nothing() -> None:
    table = cluster("a")
    table.placed("r", "a", 10, now_s=0.0)
    load = LoadReport(queued_requests=1, queued_prefill_tokens=1600)  # what of it is cached is not known yet
    report(table, "a", load, admitted=("r",))
    table.ended("r")
    assert counted(table) == (0, 0, 0, 0, 0, 0)


def test_a_request_whose_end_is_reported_is_not_taken_out_twice() -> None:
    table = cluster("a", "b")
    report(table, "a", BUSY, admitted=("r", "s"))
    report(table, "a", BUSY, ended=("r",))
    table.ended("r")
    assert counted(table) == (4, 1, 3, 2000, 900, 120)
    report(table, "a", BUSY, admitted=("t",), ended=("t",))
    table.ended("t")
    assert counted(table) == (4, 1, 3, 2000, 900, 120), "it came and went within one report"


def test_a_request_that_has_moved_is_taken_out_where_it_went() -> None:
    table = cluster("a", "b")
    report(table, "a", BUSY, admitted=("r",))
    report(table, "b", BUSY, admitted=("r",))
    report(table, "a", BUSY, ended=("r",))
    table.ended("r")
    assert counted(table) == (4, 1, 3, 2000, 900, 120)
    view = table.snapshot("m")
    assert view is not None
    assert view.running_requests.tolist() == [4, 3]


def test_nothing_becomes_less_than_nothing() -> None:
    table = cluster("a")
    report(table, "a", LoadReport(), admitted=("r", "s"))  # a worker that does not name who has ended
    table.ended("r")
    assert counted(table) == (0, 0, 0, 0, 0, 0)


def test_a_lost_instance_takes_its_requests_along() -> None:
    table = cluster("a")
    report(table, "a", BUSY, admitted=("r",))
    table.lost("a", "1")
    table.joined(instance("a"))
    report(table, "a", BUSY)
    table.ended("r")
    assert counted(table) == (4, 1, 3, 2000, 900, 120)


def test_what_is_remembered_is_bounded() -> None:
    table = cluster("a", limits=ClusterLimits(max_indexed_blocks=10, max_counted=2))
    report(table, "a", BUSY, admitted=("r", "s", "t"))
    table.ended("r")
    assert counted(table) == (4, 1, 3, 2000, 900, 120)
    table.ended("s")
    assert counted(table)[0] == 3


def test_what_an_instance_counts_goes_with_it_to_another_table() -> None:
    former, table = cluster("a", "b"), ClusterTable(ClusterLimits(max_indexed_blocks=10))
    former.placed("r", "a", 700, now_s=0.0)
    report(former, "b", BUSY, admitted=("elsewhere",))
    report(former, "a", BUSY, admitted=("r",))
    table.adopt(former, "a")
    table.ended("elsewhere")
    assert counted(table) == (4, 1, 3, 2000, 900, 120)
    table.ended("r")
    assert counted(table) == (4, 0, 3, 2000, 200, 120)


EVENTS = st.lists(
    st.tuples(st.sampled_from("ab"), st.sets(st.sampled_from("rstu")), st.sets(st.sampled_from("rstu")), st.booleans()),
    max_size=20,
)


@given(EVENTS)
def test_a_request_is_counted_where_it_was_last_admitted_and_has_not_ended(
    events: list[tuple[str, set[str], set[str], bool]],
) -> None:
    requests, model = CountedRequests(max_requests=100), dict[str, str]()
    for where, admitted, ended, is_report in events:
        if is_report:
            requests.reported(where, dict.fromkeys(admitted, 5), ended)
            model.update(dict.fromkeys(admitted, where))
            for each in ended:
                if model.get(each) == where:
                    del model[each]
        else:
            for each in ended:
                found, known = requests.ended(each), model.pop(each, None)
                assert (found and found.instance_id) == known
                assert found is None or found.prefill_tokens in (0, 5)
        requests.validate()
        assert len(requests) == len(model)
