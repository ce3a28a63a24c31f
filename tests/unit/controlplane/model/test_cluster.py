"""The cluster table: events in, snapshots out."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.expected_blocks import marks_of
from controlplane.model.instance import InstanceState, KvBlocks, LoadReport
from controlplane.model.kv_costs import KvCostRow, datasheet_kv_costs
from controlplane.model.snapshot import Snapshot
from mesh.errors import IllegalTransition
from tests.examples import examples
from tests.unit.controlplane.builders import BLOCK_TOKENS, cache, cached_tokens, cluster, instance, report


def snapshot(table: ClusterTable, model: str = "m") -> Snapshot:
    found = table.snapshot(model)
    assert found is not None
    return found


def ids(view: Snapshot) -> list[str]:
    return [i.instance_id for i in view.instances]


def test_instances_stand_in_the_order_of_their_ids() -> None:
    assert ids(snapshot(cluster("c", "a", "b"))) == ["a", "b", "c"]


def test_indicators_are_what_was_reported() -> None:
    table = cluster("a", "b")
    report(table, "b", LoadReport(3, 2, 700, 5000, 40))
    view = snapshot(table)
    assert view.running_requests.tolist() == [0, 3]
    assert view.queued_requests.tolist() == [0, 2]
    assert view.queued_prefill_tokens.tolist() == [0, 700]
    assert view.running_tokens.tolist() == [0, 5000]
    assert view.kv_blocks_used.tolist() == [0, 40]
    assert view.kv_blocks_total.tolist() == [1000, 1000]
    assert view.batch_requests.tolist() == [0, 5]
    assert table.load("b").running_tokens == 5000


def test_an_instance_is_placeable_once_it_reports_ready() -> None:
    table = ClusterTable(ClusterLimits(max_indexed_blocks=10))
    table.joined(instance("a"))
    assert snapshot(table).refusal(0) == "is starting"
    report(table, "a")
    assert snapshot(table).placeable.tolist() == [True]
    assert snapshot(table).refusal(0) == ""
    report(table, "a", state=InstanceState.DRAINING)
    assert snapshot(table).placeable_instances == 0
    assert snapshot(table).refusal(0) == "is draining"


def test_stale_instances_are_not_placeable_until_fresh_again() -> None:
    table = cluster("a", "b")
    table.staled("a", "1", True)
    assert snapshot(table).placeable.tolist() == [False, True]
    assert "stale" in snapshot(table).refusal(0)
    table.staled("a", "1", False)
    assert snapshot(table).placeable.tolist() == [True, True]


def test_a_snapshot_never_changes_and_is_shared_while_nothing_changes() -> None:
    table = cluster("a")
    before = snapshot(table)
    assert snapshot(table) is before
    report(table, "a", LoadReport(running_requests=9), InstanceState.DRAINING)
    assert before.running_requests.tolist() == [0]
    assert before.placeable.tolist() == [True]
    after = snapshot(table)
    assert after.version > before.version
    assert after.running_requests.tolist() == [9]
    for array in (after.running_requests, after.placeable):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_placed_requests_count_until_a_report_admits_them() -> None:
    table = cluster("a", "b")
    table.placed("r1", "a", 300, now_s=0.0)
    table.placed("r2", "a", 50, now_s=0.1)
    view = snapshot(table)
    assert view.unreported_requests.tolist() == [2, 0]
    assert view.pending_prefill_tokens.tolist() == [350, 0]
    assert view.batch_requests.tolist() == [2, 0]
    report(table, "a", LoadReport(running_requests=1, queued_prefill_tokens=200), admitted=("r1", "stranger"))
    view = snapshot(table)
    assert view.unreported_requests.tolist() == [1, 0]
    assert view.pending_prefill_tokens.tolist() == [250, 0]
    table.ended("r2")
    table.ended("r2")
    assert snapshot(table).unreported_requests.tolist() == [0, 0]


def test_a_request_placed_anew_leaves_its_first_instance() -> None:
    table = cluster("a", "b")
    table.placed("r", "a", 10, now_s=0.0)
    table.placed("r", "b", 20, now_s=1.0)
    assert snapshot(table).unreported_prefill_tokens.tolist() == [0, 20]
    report(table, "a", admitted=("r",))
    assert snapshot(table).unreported_requests.tolist() == [0, 1], "a's late report is not about b"


def test_a_request_that_never_arrives_is_forgotten() -> None:
    table = cluster("a", limits=ClusterLimits(max_indexed_blocks=10, unreported_s=5.0))
    table.placed("r1", "a", 10, now_s=0.0)
    table.placed("r2", "a", 10, now_s=3.0)
    assert table.forget_unreported(now_s=5.0) == 0
    assert table.forget_unreported(now_s=6.0) == 1
    assert snapshot(table).unreported_requests.tolist() == [1]
    table.placed("r3", "a", 10, now_s=9.0)
    assert snapshot(table).unreported_requests.tolist() == [1], "placing forgets too"


def test_open_placements_are_bounded() -> None:
    table = cluster("a", limits=ClusterLimits(max_indexed_blocks=10, max_unreported_requests=3))
    for number in range(10):
        table.placed(f"r{number}", "a", 1, now_s=0.0)
    assert table.unreported_requests() == 3
    assert snapshot(table).unreported_requests.tolist() == [3]


def test_a_lost_instance_leaves_with_its_cache_and_corrections() -> None:
    table = cluster("a", "b")
    cache(table, "a", 1, 2)
    cache(table, "b", 1)
    table.placed("r", "a", 10, now_s=0.0)
    table.lost("a", "1")
    view = snapshot(table)
    assert ids(view) == ["b"]
    assert cached_tokens(table, view, [1, 2]).tolist() == [16]
    assert table.unreported_requests() == 0


def test_a_new_incarnation_starts_afresh() -> None:
    table = cluster("a")
    cache(table, "a", 1, 2)
    table.joined(instance("a", incarnation_id="2"))
    view = snapshot(table)
    assert len(view) == 1
    assert view.instances[0].incarnation_id == "2"
    assert cached_tokens(table, view, [1, 2]).tolist() == [0]
    with pytest.raises(IllegalTransition, match="incarnation 1"):
        report(table, "a")


@pytest.mark.parametrize("event", ["lost", "load report", "staleness", "KV update"])
def test_events_about_strangers_are_bugs_and_say_so(event: str) -> None:
    table = cluster("a")
    calls = {
        "lost": lambda: table.lost("x", "1"),
        "load report": lambda: report(table, "x"),
        "staleness": lambda: table.staled("x", "1", True),
        "KV update": lambda: cache(table, "x", 1),
    }
    with pytest.raises(IllegalTransition, match=f"{event} of instance x"):
        calls[event]()


def test_cached_tokens_follow_stores_removals_and_clears() -> None:
    table = cluster("a", "b")
    cache(table, "a", 1, 2, 3)
    cache(table, "b", 1, 3)
    assert cached_tokens(table, snapshot(table), [1, 2, 3, 4]).tolist() == [48, 16]
    table.cached("a", "1", KvBlocks(removed=(2,)))
    assert cached_tokens(table, snapshot(table), [1, 2, 3]).tolist() == [16, 16]
    table.cached("a", "1", KvBlocks(cleared=True, stored=(1, 2)))
    assert cached_tokens(table, snapshot(table), [1, 2, 3]).tolist() == [32, 16]
    table.cached("a", "1", KvBlocks(cleared=True))
    assert cached_tokens(table, snapshot(table), [1, 2, 3]).tolist() == [0, 16]


def test_a_cache_that_is_cleared_while_it_is_empty_is_still_looked_at() -> None:
    table = cluster("a", "b")
    table.cached("a", "1", KvBlocks(cleared=True))
    table.validate()
    cache(table, "a", 1, 2)
    assert cached_tokens(table, snapshot(table), [1, 2]).tolist() == [32, 0]
    table.lost("a", "1")
    table.validate()


def test_models_are_apart() -> None:
    table = cluster("a")
    table.joined(instance("z", model="other"))
    cache(table, "z", 1)
    assert ids(snapshot(table)) == ["a"]
    assert ids(snapshot(table, "other")) == ["z"]
    assert cached_tokens(table, snapshot(table), [1]).tolist() == [0]
    assert cached_tokens(table, snapshot(table, "other"), [1]).tolist() == [16]
    assert table.snapshot("unheard of") is None


def test_a_model_is_remembered_without_instances_but_not_for_ever() -> None:
    table = ClusterTable(ClusterLimits(max_indexed_blocks=10, max_models=3))
    for number in range(10):
        table.joined(instance("a", model=f"m{number}"))
        table.lost("a", "1")
        assert f"m{number}" in table.models()
    assert len(table.models()) <= 3


def test_refused_blocks_are_reported_to_the_caller() -> None:
    table = cluster("a", limits=ClusterLimits(max_indexed_blocks=2))
    assert table.cached("a", "1", KvBlocks(stored=(1, 2, 3))) == 1


class CorrectionsMachine(RuleBasedStateMachine):
    """Whatever happens in whatever order, the corrections are those of the requests that are still open."""

    def __init__(self) -> None:
        super().__init__()
        self.table = cluster("a", "b")
        self.open: dict[str, tuple[str, int]] = {}

    @rule(request_id=st.sampled_from("uvwxyz"), where=st.sampled_from("ab"), tokens=st.integers(0, 50))
    def placed(self, request_id: str, where: str, tokens: int) -> None:
        self.table.placed(request_id, where, tokens, now_s=0.0)
        self.open[request_id] = (where, tokens)

    @rule(request_id=st.sampled_from("uvwxyz"))
    def ended(self, request_id: str) -> None:
        self.table.ended(request_id)
        self.open.pop(request_id, None)

    @rule(
        where=st.sampled_from("ab"),
        admitted=st.sets(st.sampled_from("uvwxyz")),
        ended=st.sets(st.sampled_from("uvwxyz")),
        load=st.builds(LoadReport, *(st.integers(0, 9) for _ in range(5))),
    )
    def reported(self, where: str, admitted: set[str], ended: set[str], load: LoadReport) -> None:
        report(self.table, where, load, admitted=tuple(admitted), ended=tuple(ended))
        for request_id in admitted:
            if self.open.get(request_id, ("", 0))[0] == where:
                del self.open[request_id]

    @rule(where=st.sampled_from("ab"))
    def restarted(self, where: str) -> None:
        self.table.lost(where, "1")
        self.table.joined(instance(where))
        report(self.table, where)
        self.open = {request_id: at for request_id, at in self.open.items() if at[0] != where}

    @invariant()
    def sums_agree(self) -> None:
        self.table.validate()
        view = snapshot(self.table)
        for row, where in enumerate("ab"):
            tokens = [tokens for at, tokens in self.open.values() if at == where]
            assert view.unreported_requests[row] == len(tokens)
            assert view.unreported_prefill_tokens[row] == sum(tokens)
        reported = view.running_requests + view.queued_requests
        assert np.array_equal(view.batch_requests, reported + view.unreported_requests)


CorrectionsMachine.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
TestCorrections = CorrectionsMachine.TestCase


def test_kv_can_be_brought_where_somebody_has_said_so() -> None:
    table = cluster("a", "b")
    before = snapshot(table)
    assert not before.brings_kv
    assert np.isinf(before.kv_costs[[KvCostRow.PULL_TOKEN, KvCostRow.LOAD_TOKEN]]).all()
    guess = datasheet_kv_costs(50_000, pulls=True, loads=False)
    table.kv_costed("b", "1", guess)
    after = snapshot(table)
    assert after.brings_kv
    assert after.uniform_kv_costs is None
    assert after.kv_costs[KvCostRow.PULL_TOKEN].tolist() == [np.inf, 0.01]
    assert np.isinf(after.kv_costs[KvCostRow.LOAD_TOKEN]).all()
    table.kv_costed("a", "1", guess)
    assert snapshot(table).uniform_kv_costs == (2.0, 0.01, 0.5, np.inf)
    table.lost("b", "1")
    assert snapshot(table).brings_kv
    heir = cluster()
    heir.adopt(table, "a")
    assert snapshot(heir).uniform_kv_costs == (2.0, 0.01, 0.5, np.inf)


def test_what_is_only_expected_is_not_held() -> None:
    table, chain = cluster("a", "b"), list(range(1, 17))
    cache(table, "b", *chain[:8])
    table.placed("r", "a", 256, 1.0, marks_of(chain, BLOCK_TOKENS), computed_ms=500.0)
    view = snapshot(table)
    held = table.held_tokens(view, chain)
    assert held.tolist() == [0, 128]
    for now_s, left_ms in ((1.2, 300.0), (1.6, 0.0)):
        cached, comes_ms = table.with_expected(view, chain, held, now_s)
        assert cached.tolist() == [256, 128]
        assert comes_ms is not None
        assert comes_ms.tolist() == pytest.approx([left_ms, 0.0])
    assert table.with_expected(view, chain[:8], held, 1.2) == (held, None)
