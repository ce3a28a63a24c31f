"""A watcher's way from the state to the changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.monitor.instance_registry import InstanceRegistry, ReportedInstance
from controlplane.monitor.watcher import MESSAGE_WEIGHT, Watcher
from penstock.v1 import monitor_pb2, worker_pb2
from tests.examples import examples

IDS = "abcd"


def change(instance_id: str, blocks: int = 0) -> monitor_pb2.InstanceUpdate:
    return monitor_pb2.InstanceUpdate(instance_id=instance_id, kv=monitor_pb2.KvUpdate(stored=range(blocks)))


def test_changes_of_an_instance_are_queued_once_its_state_was_handed_out() -> None:
    watcher = Watcher("s", ["a", "b"], max_backlog=100)
    watcher.offer(change("a"))
    assert watcher.next_undescribed() == "a"
    watcher.offer(change("a"))
    watcher.offer(change("b"))
    watcher.offer(change("newcomer"))
    assert [c.instance_id for c in watcher.take()] == ["a", "newcomer"]
    assert watcher.next_undescribed() == "b"
    assert watcher.next_undescribed() is None


def test_a_slow_watcher_is_cut_off_and_holds_nothing() -> None:
    watcher = Watcher("s", [], max_backlog=1000)
    for _ in range(9):
        watcher.offer(change("a", blocks=100))
    assert not watcher.cut_off
    watcher.offer(change("a", blocks=100))
    assert watcher.cut_off
    assert watcher.backlog_weight == 0
    watcher.offer(change("a"))
    assert watcher.take() == []


def test_messages_are_bounded_and_lose_nothing() -> None:
    watcher = Watcher("s", [], max_backlog=10 * MESSAGE_WEIGHT)
    for number in range(100):
        watcher.offer(change(str(number), blocks=999))
    messages = []
    while taken := watcher.take():
        messages.append(taken)
    assert [c.instance_id for message in messages for c in message] == [str(number) for number in range(100)]
    assert len(messages) == 5
    assert watcher.backlog_weight == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.sampled_from(IDS), st.integers(1, 30)),
        st.tuples(st.just("remove"), st.sampled_from(IDS), st.integers(1, 30)),
        st.tuples(st.just("clear"), st.sampled_from(IDS), st.just(0)),
        st.tuples(st.just("restart"), st.sampled_from(IDS), st.just(0)),
        st.tuples(st.just("lost"), st.sampled_from(IDS), st.just(0)),
        st.tuples(st.just("load"), st.sampled_from(IDS), st.integers(0, 9)),
        st.tuples(st.just("describe"), st.just(""), st.just(0)),
    ),
    max_size=60,
)


@given(before=STEPS, during=STEPS)
@settings(deadline=None, max_examples=examples(200))
def test_whatever_happens_while_it_starts_a_watcher_ends_with_the_books_state(
    before: list[tuple[str, str, int]], during: list[tuple[str, str, int]]
) -> None:
    registry = InstanceRegistry(stale_s=1e9)
    incarnations = iter(range(1000))
    for step in before:
        happen(registry, step, incarnations)
    watcher = Watcher("s", [i.instance_id for i in registry.instances()], max_backlog=10**6)
    told: list[monitor_pb2.InstanceUpdate] = []
    for step in during:
        if step[0] == "describe":
            describe_next(registry, watcher, told)
            continue
        for each in happen(registry, step, incarnations):
            watcher.offer(each)
    while describe_next(registry, watcher, told):
        pass
    told += watcher.take()
    assert replay(told) == {
        i.instance_id: (i.description.incarnation_id, i.blocks, i.load.running_requests if i.load else None)
        for i in registry.instances()
    }


def happen(
    registry: InstanceRegistry, step: tuple[str, str, int], incarnations: object
) -> list[monitor_pb2.InstanceUpdate]:
    kind, instance_id, number = step
    instance = registry.get(instance_id)
    if kind == "restart" or (instance is None and kind in ("store", "load")):
        description = worker_pb2.InstanceDescription(
            instance_id=instance_id,
            incarnation_id=str(next(incarnations)),  # type: ignore[call-overload]
        )
        return registry.joined(description, 0.0)[1]
    if instance is None:
        return []
    return happen_to(registry, instance, kind, number)


def happen_to(
    registry: InstanceRegistry, instance: ReportedInstance, kind: str, number: int
) -> list[monitor_pb2.InstanceUpdate]:
    match kind:
        case "store":
            return registry.cached(instance, monitor_pb2.KvUpdate(stored=[number]))
        case "remove":
            return registry.cached(instance, monitor_pb2.KvUpdate(removed=[number]))
        case "clear":
            return registry.cached(instance, monitor_pb2.KvUpdate(cleared=True))
        case "lost":
            return registry.lost(instance, "died")
        case "load":
            return registry.loaded(instance, worker_pb2.LoadReport(running_requests=number), 0.0)
    return []


def describe_next(registry: InstanceRegistry, watcher: Watcher, told: list[monitor_pb2.InstanceUpdate]) -> bool:
    instance_id = watcher.next_undescribed()
    if instance_id is None:
        return False
    instance = registry.get(instance_id)
    if instance is not None:
        told += registry.describe(instance)
    told += watcher.take()
    return True


def replay(told: list[monitor_pb2.InstanceUpdate]) -> dict[str, tuple[str, set[int], int | None]]:
    """What a watcher believes; strict about the order of things."""
    believed: dict[str, tuple[str, set[int], int | None]] = {}
    for each in told:
        known = believed.get(each.instance_id)
        kind = each.WhichOneof("change")
        if kind == "joined":
            assert known is None, "joined twice"
            believed[each.instance_id] = (each.incarnation_id, set(), None)
            continue
        assert known is not None, f"{kind} of a stranger"
        incarnation_id, blocks, _ = known
        assert each.incarnation_id == incarnation_id
        if kind == "lost":
            del believed[each.instance_id]
        elif kind == "load":
            believed[each.instance_id] = (incarnation_id, blocks, each.load.running_requests)
        elif kind == "kv":
            if each.kv.cleared:
                blocks.clear()
            blocks.difference_update(each.kv.removed)
            blocks.update(each.kv.stored)
    return believed
