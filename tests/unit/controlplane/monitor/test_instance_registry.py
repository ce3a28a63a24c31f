"""The monitor's registry: reports in, changes out."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.monitor.instance_registry import MAX_ADMITTED, PIECE_BLOCKS, InstanceRegistry, ReportedInstance
from penstock.v1 import monitor_pb2, worker_pb2

STALE_S = 2.0


def description(instance_id: str = "a", incarnation_id: str = "1") -> worker_pb2.InstanceDescription:
    return worker_pb2.InstanceDescription(instance_id=instance_id, incarnation_id=incarnation_id, model="m")


def kinds(changes: list[monitor_pb2.InstanceUpdate]) -> list[str | None]:
    return [change.WhichOneof("change") for change in changes]


def joined(registry: InstanceRegistry, instance_id: str = "a", now_s: float = 0.0) -> ReportedInstance:
    instance, _ = registry.joined(description(instance_id), now_s)
    return instance


def test_an_instance_joins_reports_and_is_lost() -> None:
    registry = InstanceRegistry(STALE_S)
    instance, changes = registry.joined(description(), 0.0)
    assert kinds(changes) == ["joined"]
    assert changes[0].instance_id == "a"
    assert changes[0].incarnation_id == "1"
    changes = registry.loaded(instance, worker_pb2.LoadReport(running_requests=3), 0.1)
    assert changes[0].load.running_requests == 3
    changes = registry.lost(instance, "it died")
    assert changes[0].lost.reason == "it died"
    assert registry.instances() == []
    assert registry.lost(instance, "again") == []


def test_load_older_than_the_bound_is_stale_until_the_next_report() -> None:
    registry = InstanceRegistry(STALE_S)
    instance = joined(registry)
    registry.loaded(instance, worker_pb2.LoadReport(), 1.0)
    assert registry.tick(3.0) == []
    changes = registry.tick(3.1)
    assert kinds(changes) == ["stale"]
    assert changes[0].stale
    assert registry.tick(9.0) == [], "told once"
    changes = registry.loaded(instance, worker_pb2.LoadReport(), 9.5)
    assert kinds(changes) == ["load", "stale"]
    assert not changes[1].stale


def test_an_instance_that_never_reports_load_becomes_stale() -> None:
    registry = InstanceRegistry(STALE_S)
    joined(registry, now_s=5.0)
    assert registry.tick(7.0) == []
    assert kinds(registry.tick(7.1)) == ["stale"]


def test_a_newer_stream_supersedes_the_older_one() -> None:
    registry = InstanceRegistry(STALE_S)
    older = joined(registry)
    newer, changes = registry.joined(description(incarnation_id="2"), 1.0)
    assert kinds(changes) == ["lost", "joined"]
    assert [change.incarnation_id for change in changes] == ["1", "2"]
    assert older.superseded
    assert registry.lost(older, "its stream ended at last") == []
    assert registry.get("a") is newer


def test_blocks_follow_stores_removals_and_clears() -> None:
    registry = InstanceRegistry(STALE_S)
    instance = joined(registry)
    registry.cached(instance, monitor_pb2.KvUpdate(stored=[1, 2, 3]))
    registry.cached(instance, monitor_pb2.KvUpdate(removed=[2, 9], stored=[4]))
    assert instance.blocks == {1, 3, 4}
    registry.cached(instance, monitor_pb2.KvUpdate(cleared=True, stored=[7]))
    assert instance.blocks == {7}


def test_the_state_is_described_in_bounded_pieces_as_of_one_moment() -> None:
    registry = InstanceRegistry(STALE_S)
    instance = joined(registry)
    blocks = list(range(1, 2 * PIECE_BLOCKS + 10))
    registry.cached(instance, monitor_pb2.KvUpdate(stored=blocks))
    registry.loaded(instance, worker_pb2.LoadReport(queued_requests=5), 0.5)
    registry.tick(10.0)
    pieces = registry.describe(instance)
    first = next(pieces)
    registry.cached(instance, monitor_pb2.KvUpdate(cleared=True))
    changes = [first, *pieces]
    assert kinds(changes) == ["joined", "kv", "kv", "kv", "load", "stale"]
    assert max(len(change.kv.stored) for change in changes) == PIECE_BLOCKS
    assert sorted(block for change in changes for block in change.kv.stored) == blocks


def test_decoding_requests_are_passed_on_and_not_kept() -> None:
    registry = InstanceRegistry(STALE_S)
    instance = joined(registry)
    changes = registry.decoding(instance, monitor_pb2.DecodeReport(request_ids=["r"]))
    assert kinds(changes) == ["decode"]
    assert list(changes[0].decode.request_ids) == ["r"]
    assert kinds(list(registry.describe(instance))) == ["joined"]


def test_who_begins_to_watch_is_told_which_requests_were_admitted_of_late_and_which_of_them_have_ended() -> None:
    registry = InstanceRegistry(stale_s=1.0)
    instance, _ = registry.joined(worker_pb2.InstanceDescription(instance_id="a", incarnation_id="1"), 0.0)
    registry.loaded(instance, worker_pb2.LoadReport(running_requests=1, admitted_request_ids=["r1"]), 0.0)
    registry.loaded(instance, worker_pb2.LoadReport(running_requests=2, admitted_request_ids=["r2"]), 0.1)
    registry.loaded(instance, worker_pb2.LoadReport(running_requests=1, ended_request_ids=["r1", "an older one"]), 0.2)
    registry.loaded(instance, worker_pb2.LoadReport(running_requests=1), 0.3)
    (*_, last) = registry.describe(instance)
    assert (last.load.running_requests, list(last.load.admitted_request_ids)) == (1, ["r1", "r2"])
    assert list(last.load.ended_request_ids) == ["r1"]
    crowd = [f"s{number}" for number in range(2000)]
    registry.loaded(instance, worker_pb2.LoadReport(admitted_request_ids=crowd), 0.4)
    (*_, last) = registry.describe(instance)
    assert list(last.load.admitted_request_ids) == crowd[-MAX_ADMITTED:]


EVENTS = st.lists(
    st.tuples(st.sampled_from(["join", "end", "load", "time"]), st.sampled_from("abc"), st.floats(0.0, 3.0)),
    max_size=40,
)


@given(EVENTS)
def test_who_follows_the_changes_knows_who_is_there_and_who_is_stale(events: list[tuple[str, str, float]]) -> None:
    registry, now_s = InstanceRegistry(STALE_S), 0.0
    streams: list[ReportedInstance] = []
    known: dict[str, tuple[str, bool]] = {}
    for what, name, duration_s in events:
        mine = [stream for stream in streams if stream.instance_id == name]
        match what:
            case "join":
                stream, changes = registry.joined(description(name, str(len(streams))), now_s)
                streams.append(stream)
            case "end":
                changes = [change for stream in mine for change in registry.lost(stream, "its stream ended")]
            case "load":
                here = [stream for stream in mine if registry.get(name) is stream]
                changes = [each for stream in here for each in registry.loaded(stream, worker_pb2.LoadReport(), now_s)]
            case _:
                now_s += duration_s
                changes = registry.tick(now_s)
        for change in changes:
            incarnation_id = known.get(change.instance_id, ("", False))[0]
            match change.WhichOneof("change"):
                case "joined":
                    assert not incarnation_id, "it was lost before"
                    known[change.instance_id] = (change.incarnation_id, False)
                case "lost":
                    assert change.incarnation_id == incarnation_id
                    del known[change.instance_id]
                case "stale":
                    assert change.stale != known[change.instance_id][1], "told once"
                    known[change.instance_id] = (incarnation_id, change.stale)
        registry.validate()
        found = {each.instance_id: (each.description.incarnation_id, each.stale) for each in registry.instances()}
        assert known == found


def test_blocks_of_the_host_are_told_apart_from_the_engines() -> None:
    registry = InstanceRegistry(STALE_S)
    instance = joined(registry)
    registry.cached(instance, monitor_pb2.KvUpdate(stored=[1, 2]))
    registry.cached(instance, monitor_pb2.KvUpdate(stored=[2, 3], tier=monitor_pb2.KV_TIER_HOST))
    registry.cached(instance, monitor_pb2.KvUpdate(cleared=True))
    assert (instance.blocks, instance.host_blocks) == (set(), {2, 3})
    told = [update.kv for update in registry.describe(instance) if update.WhichOneof("change") == "kv"]
    assert [(set(kv.stored), kv.tier) for kv in told] == [({2, 3}, monitor_pb2.KV_TIER_HOST)]


def test_many_instances_are_asked_to_report_less_often() -> None:
    registry = InstanceRegistry(stale_s=0.4, max_reports_per_s=100)
    asked = []
    for number in range(12):
        joined(registry, f"i{number}")
        asked.append(registry.report_interval_ms)
    assert asked == [0] * 5 + [60, 70, 80, 90, 100, 100, 100], "their part, and never a quarter of what is stale"
    assert InstanceRegistry(stale_s=0.4).report_interval_ms == 0
