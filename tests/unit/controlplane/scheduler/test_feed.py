"""From the monitor's updates to the table in force."""

import pytest

from controlplane.decode_message import decode_message
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.frontend_links import FrontendLinks
from controlplane.model.instance import InstanceState
from controlplane.model.running_request import RunningRequest
from controlplane.model.step_costs import DATASHEET_COSTS
from controlplane.policies.rescheduling.decode_load import decode_load
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.scheduler.feed import UNLINKED_S, ClusterFeed
from mesh.errors import IllegalTransition
from penstock.v1 import monitor_pb2, worker_pb2
from tests.unit.controlplane.builders import cached_tokens


def change(instance_id: str = "a", incarnation_id: str = "1", **what: object) -> monitor_pb2.InstanceUpdate:
    return monitor_pb2.InstanceUpdate(instance_id=instance_id, incarnation_id=incarnation_id, **what)  # type: ignore[arg-type]


def joined(instance_id: str = "a", incarnation_id: str = "1") -> monitor_pb2.InstanceUpdate:
    description = worker_pb2.InstanceDescription(
        instance_id=instance_id, incarnation_id=incarnation_id, model="m", block_tokens=16, address="host:1"
    )
    return change(instance_id, incarnation_id, joined=description)


def ready(instance_id: str = "a", running: int = 0, admitted: tuple[str, ...] = ()) -> monitor_pb2.InstanceUpdate:
    load = worker_pb2.LoadReport(
        running_requests=running, state=worker_pb2.INSTANCE_STATE_READY, admitted_request_ids=admitted
    )
    return change(instance_id, load=load)


def update(sequence: int, *changes: monitor_pb2.InstanceUpdate, synced: bool = False) -> monitor_pb2.ClusterUpdate:
    return monitor_pb2.ClusterUpdate(sequence=sequence, instances=changes, synced=synced)


def feed_with(*instance_ids: str, max_blocks: int = 100) -> ClusterFeed:
    feed = ClusterFeed(ClusterLimits(max_indexed_blocks=max_blocks))
    feed.begin()
    changes = [each for instance_id in instance_ids for each in (joined(instance_id), ready(instance_id))]
    feed.apply(update(1, *changes, synced=True), 10.0)
    return feed


def ids(feed: ClusterFeed) -> list[str]:
    return [instance.instance_id for instance in feed.table.instances()]


def test_the_table_comes_into_force_when_it_is_complete() -> None:
    feed = ClusterFeed(ClusterLimits(max_indexed_blocks=100))
    feed.begin()
    feed.apply(update(1, joined("a"), ready("a")), 1.0)
    assert ids(feed) == []
    assert feed.heard_s is None
    feed.apply(update(2, joined("b"), synced=True), 2.0)
    assert ids(feed) == ["a", "b"]
    assert feed.synced
    assert feed.heard_s == 2.0
    feed.apply(update(3), 3.0)
    assert feed.heard_s == 3.0


def test_every_kind_of_change_arrives() -> None:
    feed = feed_with("a")
    feed.table.placed("r", "a", 50, now_s=0.0)
    kv = monitor_pb2.KvUpdate(stored=[1, 2])
    feed.apply(update(2, change(kv=kv), ready(running=4, admitted=("r",)), change(stale=True)), 11.0)
    snapshot = feed.table.snapshot("m")
    assert snapshot is not None
    assert snapshot.running_requests.tolist() == [4]
    assert snapshot.unreported_requests.tolist() == [0]
    assert snapshot.state(0) is InstanceState.READY
    assert snapshot.placeable.tolist() == [False]
    assert cached_tokens(feed.table, snapshot, [1, 2]).tolist() == [32]
    feed.apply(update(3, change(lost=monitor_pb2.InstanceLost(reason="died"))), 12.0)
    assert ids(feed) == []


def test_a_lost_monitor_leaves_the_last_known_instances_in_force_until_the_next_state_is_complete() -> None:
    feed = feed_with("a", "b")
    feed.end()
    assert ids(feed) == ["a", "b"]
    assert not feed.synced
    feed.begin()
    feed.apply(update(1, joined("c")), 20.0)
    assert ids(feed) == ["a", "b"]
    assert feed.heard_s == 10.0, "an incomplete state is not trusted yet"
    feed.apply(update(2, synced=True), 21.0)
    assert ids(feed) == ["c"]


def test_a_gap_in_the_sequence_is_noticed() -> None:
    feed = feed_with("a")
    with pytest.raises(IllegalTransition, match="update 3 came after 1"):
        feed.apply(update(3), 11.0)


def test_updates_outside_of_a_watch_are_a_bug() -> None:
    feed = feed_with("a")
    feed.end()
    with pytest.raises(IllegalTransition, match="outside of a watch"):
        feed.apply(update(2), 11.0)


def test_the_directory_is_believed_only_while_no_monitor_tells() -> None:
    feed = feed_with("a", "b")
    assert not feed.left("a", "1")
    feed.end()
    assert not feed.left("a", "another incarnation")
    assert feed.left("a", "1")
    assert ids(feed) == ["b"]
    assert not feed.left("a", "1")


def test_what_instances_told_of_their_requests_goes_with_them_whoever_tells() -> None:
    feed = feed_with("a", "b", "c")
    report = decode_message(decode_load([RunningRequest("r", 9, 1, None)], ReschedulerParameters().horizon))
    feed.apply(update(2, *(change(each, decode=report) for each in "abc")), 11.0)
    feed.end()
    assert feed.left("b", "1")
    assert feed.decode_loads.get("b", "1") is None
    feed.begin()
    feed.apply(update(1, joined("a"), ready("a"), synced=True), 12.0)
    assert feed.decode_loads.get("a", "1") is not None
    assert feed.decode_loads.get("c", "1") is None, "it has gone while no monitor was heard"


def test_a_full_index_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    feed = feed_with("a", max_blocks=10)
    feed.apply(update(2, change(kv=monitor_pb2.KvUpdate(stored=range(1, 15)))), 11.0)
    assert feed.refused_blocks_total == 4
    assert "the prefix index is full" in caplog.text


LOST = monitor_pb2.InstanceLost(reason="its report stream broke")


def linked_feed(*instance_ids: str) -> tuple[ClusterFeed, FrontendLinks]:
    """The directory knows the instances, and one frontend is connected to all of them."""
    feed, links = feed_with(*instance_ids), FrontendLinks()
    for instance_id in instance_ids:
        feed.announced(instance_id, "1")
    feed.linked(links)
    links.report((instance_id, "1") for instance_id in instance_ids)
    return feed, links


def placeable(feed: ClusterFeed) -> list[str]:
    snapshot = feed.table.snapshot("m")
    assert snapshot is not None
    return [each.instance_id for row, each in enumerate(snapshot.instances) if snapshot.placeable[row]]


def requests_on(feed: ClusterFeed, row: int = 0) -> int:
    snapshot = feed.table.snapshot("m")
    assert snapshot is not None
    return int(snapshot.batch_requests[row])


def test_an_instance_that_only_its_monitor_has_lost_is_placed_on_by_its_last_load_and_what_was_placed_since() -> None:
    feed, _ = linked_feed("a")
    feed.apply(update(2, ready(running=4)), 11.0)
    feed.apply(update(3, change(lost=LOST)), 12.0)
    assert placeable(feed) == ["a"]
    assert feed.by_last_load == {"a"}
    feed.table.placed("r", "a", 100, 12.5)
    feed.table.placed("s", "a", 100, 12.5)
    assert feed.table.forget_unreported(60.0) == 0, "no report will ever count it"
    assert requests_on(feed) == 6
    feed.table.ended("s")
    assert requests_on(feed) == 5
    feed.apply(update(4, joined(), ready(running=1)), 61.0)
    assert feed.by_last_load == frozenset()
    assert requests_on(feed) == 1


def test_an_instance_that_dies_is_not_placed_on_once_its_frontends_have_lost_it_and_is_forgotten_later() -> None:
    feed, links = linked_feed("a")
    feed.apply(update(2, change(lost=LOST)), 12.0)
    links.report([])
    feed.review(12.1)
    assert (placeable(feed), feed.by_last_load, ids(feed)) == ([], frozenset(), ["a"])
    links.report([("a", "1")])
    feed.review(20.0)
    assert placeable(feed) == ["a"], "it had only lost its connections"
    feed.unlinked(links)
    feed.review(20.0 + UNLINKED_S)
    assert ids(feed) == ["a"]
    feed.review(20.1 + UNLINKED_S)
    assert ids(feed) == []


def test_an_instance_that_nobody_is_connected_to_or_that_has_left_is_lost_with_its_reports() -> None:
    feed, links = linked_feed("a", "b", "c")
    links.report([("a", "another incarnation"), ("b", "1"), ("c", "1")])
    assert not feed.left("b", "1")
    feed.apply(update(2, *(change(each, lost=LOST) for each in "abc")), 12.0)
    assert ids(feed) == ["c"]
    assert feed.left("c", "1")
    assert ids(feed) == []


def test_a_monitor_that_comes_back_without_an_instance_does_not_take_it_away() -> None:
    feed, _ = linked_feed("a", "b")
    feed.apply(update(2, ready(running=4)), 11.0)
    feed.table.placed("r", "a", 100, 11.5)
    feed.end()
    feed.begin()
    feed.apply(update(1, joined("b"), ready("b"), synced=True), 20.0)
    assert placeable(feed) == ["a", "b"]
    assert feed.by_last_load == {"a"}
    assert requests_on(feed) == 5
    feed.table.ended("r")
    assert requests_on(feed) == 4
    feed.apply(update(2, joined("a"), ready("a")), 21.0)
    assert feed.by_last_load == frozenset()


@pytest.mark.parametrize("told_before", [True, False])
def test_a_monitor_that_knows_only_a_former_life_of_an_instance_does_not_bring_it_back(told_before: bool) -> None:
    """Found by seed 2734: the monitor was cut off from the worker's host before the worker was started again."""
    feed, links = linked_feed("a")
    feed.apply(update(2, joined("a", "2"), change("a", "2", load=worker_pb2.LoadReport(running_requests=4))), 11.0)
    feed.announced("a", "2") if told_before else None
    links.report([("a", "2")])
    feed.end()
    feed.begin()
    feed.apply(update(1, joined("a", "1"), change("a", "1", stale=True)), 20.0)
    feed.announced("a", "2")
    feed.apply(update(2, synced=True), 20.0)
    assert feed.table.incarnation_id("a") == "2"
    assert feed.by_last_load == {"a"}
    feed.apply(update(3, change("a", "1", stale=False), change("a", "1", lost=LOST)), 21.0)
    assert feed.table.incarnation_id("a") == "2"
    feed.apply(update(4, joined("a", "2")), 22.0)
    assert feed.by_last_load == frozenset()


def test_a_scheduler_that_never_knew_the_former_life_that_a_monitor_names_stays_with_the_one_it_is_linked_to() -> None:
    """Found by seed 910130: the scheduler had begun after the former life ended, and changed to a monitor that was cut
    off from the worker's host."""
    feed, _ = linked_feed("a")
    feed.end()
    feed.begin()
    feed.apply(update(1, joined("a", "0"), change("a", "0", stale=True), synced=True), 20.0)
    assert feed.table.incarnation_id("a") == "1"
    assert feed.by_last_load == {"a"}
    feed.apply(update(2, change("a", "0", lost=LOST)), 21.0)
    assert feed.table.incarnation_id("a") == "1"


def test_the_next_life_of_an_instance_is_believed_after_another_watch() -> None:
    """A monitor names it before the directory does."""
    feed, links = linked_feed("a")
    feed.end()
    feed.begin()
    feed.apply(update(1, joined("a", "2"), synced=True), 20.0)
    assert feed.table.incarnation_id("a") == "1"
    feed.announced("a", "2")
    links.report([("a", "2")])
    with pytest.raises(IllegalTransition):
        feed.apply(update(2, change("a", "2", load=worker_pb2.LoadReport())), 21.0)
    feed.begin()
    feed.apply(update(1, joined("a", "2"), synced=True), 21.0)
    assert feed.table.incarnation_id("a") == "2"
    assert feed.by_last_load == frozenset()


def test_stale_instances_are_placed_on_only_where_their_model_has_no_other() -> None:
    feed, links = linked_feed("a", "b")
    feed.apply(update(2, change("a", stale=True)), 11.0)
    assert placeable(feed) == ["b"]
    feed.apply(update(3, change("b", stale=True)), 12.0)
    assert placeable(feed) == ["a", "b"]
    assert feed.by_last_load == {"a", "b"}
    links.report([("a", "1")])
    feed.review(12.5)
    assert placeable(feed) == ["a"], "b hangs, or is gone"
    feed.apply(update(4, change("b", stale=False), ready("b")), 13.0)
    assert placeable(feed) == ["b"]
    assert feed.by_last_load == frozenset()


def test_what_a_pulled_token_costs_is_a_guess_until_the_instance_has_measured_it() -> None:
    feed = ClusterFeed(ClusterLimits(max_indexed_blocks=100))
    feed.begin()
    able, unable = joined("a"), joined("b")
    able.joined.pulls_prefixes, able.joined.kv_token_bytes, able.joined.max_step_tokens = True, 5_000, 1000
    feed.apply(update(1, able, unable, ready("a"), ready("b"), synced=True), 0.0)
    assert feed.table.kv_costs("a").pull_token_ms == pytest.approx(0.001)
    assert feed.table.kv_costs("b").pull_token_ms is None
    measured = ready("a")
    measured.load.pulls.token_ms = 0.5
    feed.apply(update(2, measured, ready("b")), 1.0)
    assert feed.table.kv_costs("a").pull_token_ms == pytest.approx(0.001), "what computing takes there is not known"
    measured.load.pulls.compute_token_ms = 5.0
    feed.apply(update(3, measured), 2.0)
    guessed = DATASHEET_COSTS.prefill_token_ms + DATASHEET_COSTS.fixed_ms / 1000
    pull_token_ms = feed.table.kv_costs("a").pull_token_ms
    assert pull_token_ms == pytest.approx(guessed / 10), "a tenth of what computing takes"
    feed.apply(update(4, ready("a")), 3.0)
    assert feed.table.kv_costs("a").pull_token_ms == pull_token_ms, "a report without pulls says nothing of them"
