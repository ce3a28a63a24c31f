"""Which connections go when too many are held, in any order of events."""

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.http.connections import (
    SUSPECT_S,
    Answered,
    Asked,
    Because,
    Began,
    Close,
    ConnectionManager,
    ConnectionState,
    Event,
    Lost,
    Opened,
    Tick,
)

TIMEOUT_S = 10.0
KINDS = st.sampled_from(["opened", "began", "asked", "answered", "answered early", "lost", "tick"])


def event_of(kind: str, number: int) -> Event:
    match kind:
        case "opened":
            return Opened(number)
        case "began":
            return Began(number)
        case "asked":
            return Asked(number)
        case "answered":
            return Answered(number, is_whole=True)
        case "answered early":
            return Answered(number, is_whole=False)
        case "lost":
            return Lost(number)
        case _:
            return Tick()


@given(st.integers(1, 4), st.lists(st.tuples(KINDS, st.integers(0, 6), st.floats(0, 6)), max_size=60))
def test_there_are_never_too_many_and_none_that_is_served_is_closed(
    places: int, course: list[tuple[str, int, float]]
) -> None:
    manager, now_s = ConnectionManager(places, TIMEOUT_S), 0.0
    opened_s: dict[int, float] = {}
    for kind, number, passes_s in course:
        now_s += passes_s
        if kind == "opened" and manager.state(number) is not None:
            continue  # a transport has one life
        before = {each: manager.state(each) for each in range(7)}
        for close in manager.handle(event_of(kind, number), now_s):
            assert isinstance(close.connection, int)
            assert manager.state(close.connection) is None
            assert before[close.connection] is not ConnectionState.BUSY
            if close.because is Because.LATE:
                assert before[close.connection] is ConnectionState.WAITING
                assert now_s - opened_s[close.connection] >= TIMEOUT_S
            if close.because is Because.FULL:
                assert close.connection == number
                assert len(manager) == places
        if kind == "opened":
            opened_s[number] = now_s
        manager.validate()
        if kind == "tick":
            waiting = [each for each in range(7) if manager.state(each) is ConnectionState.WAITING]
            assert all(manager.state(each) is None or now_s - opened_s[each] >= 0 for each in waiting)


def test_one_that_sends_no_whole_request_is_closed_in_time() -> None:
    manager = ConnectionManager(3, TIMEOUT_S)
    manager.handle(Opened("slow"), 0.0)
    manager.handle(Opened("served"), 0.0)
    manager.handle(Asked("served"), 0.1)
    assert manager.handle(Tick(), 9.9) == []
    assert manager.handle(Tick(), 10.0) == [Close("slow", Because.LATE)]
    assert manager.handle(Tick(), 1000.0) == [], "one that is served may take its time"


def test_an_answer_gives_the_rest_of_a_body_as_long_as_a_head() -> None:
    manager = ConnectionManager(3, TIMEOUT_S)
    manager.handle(Opened(1), 0.0)
    manager.handle(Asked(1), 0.0)
    manager.handle(Answered(1, is_whole=False), 50.0)
    assert manager.handle(Tick(), 59.0) == []
    assert manager.handle(Tick(), 60.0) == [Close(1, Because.LATE)]


def test_who_is_slow_goes_before_who_is_idle_and_who_has_just_come_last() -> None:
    manager = ConnectionManager(3, TIMEOUT_S)
    for connection in ("idle", "served", "slow"):
        manager.handle(Opened(connection), 0.0)
    for connection in ("idle", "served"):
        manager.handle(Asked(connection), 0.0)
    manager.handle(Answered("idle", is_whole=True), 0.0)
    assert manager.handle(Opened("a"), SUSPECT_S) == [Close("slow", Because.SHED)]
    assert manager.handle(Opened("b"), SUSPECT_S) == [Close("idle", Because.SHED)]
    assert manager.handle(Opened("c"), SUSPECT_S) == [Close("c", Because.FULL)]
    assert manager.state("c") is None
    manager.handle(Lost("served"), SUSPECT_S)
    assert manager.handle(Opened("d"), SUSPECT_S) == []
