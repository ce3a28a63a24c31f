"""What schedulers tell each other, as messages."""

from math import inf, nan

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from controlplane.model.shared_event import MAX_SHARED_MARKS, SharedEvent, SharedKind
from controlplane.scheduler import wire
from penstock.v1 import scheduler_pb2

EVENTS = st.builds(
    SharedEvent,
    st.sampled_from(SharedKind),
    st.text(max_size=9),
    st.text(max_size=9),
    st.integers(0, 2**32 - 1),
    st.just("scheduler-1"),
    st.lists(st.integers(0, 2**64 - 1), max_size=9).map(tuple),
    st.floats(0, 1e6, width=32),
)


def sent(event: SharedEvent) -> scheduler_pb2.SharedEvent:
    return scheduler_pb2.SharedEvent.FromString(wire.shared_event_message(event).SerializeToString())


@given(EVENTS)
def test_what_one_tells_is_what_the_other_counts(event: SharedEvent) -> None:
    assert wire.shared_event(sent(event), "scheduler-1") == event


def test_what_a_peer_tells_is_bounded() -> None:
    told = SharedEvent(SharedKind.PREFILL, "r", "a", 7, "scheduler-1", tuple(range(MAX_SHARED_MARKS + 9)), 3.0)
    counted = wire.shared_event(sent(told), "scheduler-1")
    assert counted == replace(told, marks=told.marks[:MAX_SHARED_MARKS])
    for never in (nan, inf):
        assert wire.shared_event(sent(replace(told, marks=(), computed_ms=never)), "s") == replace(
            told, marks=(), computed_ms=0.0, origin="s"
        )


def test_an_event_of_a_later_release_is_left_alone() -> None:
    assert wire.shared_event(scheduler_pb2.SharedEvent.FromString(b"\x08\x4d"), "s") is None
