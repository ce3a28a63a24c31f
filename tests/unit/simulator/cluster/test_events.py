import pytest

from mesh.errors import IllegalTransition
from simulator.cluster.events import EventQueue, Rank


def test_time_then_rank_then_place_then_order_of_scheduling() -> None:
    events = EventQueue()
    heard: list[tuple[str, float]] = []
    for at_ms, rank, name in (
        (2.0, Rank.PLAN, "plan"),
        (2.0, Rank.MESSAGE, "first message"),
        (2.0, Rank.MESSAGE, "second message"),
        (2.0, Rank.STEP_END, "step end"),
        (1.0, Rank.PLAN, "early"),
    ):
        events.at(at_ms, rank, lambda now_ms, name=name: heard.append((name, now_ms)))  # type: ignore[misc]
    events.at(2.0, Rank.MESSAGE, lambda now_ms: heard.append(("last message", now_ms)), place=1)
    events.at(2.0, Rank.MESSAGE, lambda now_ms: heard.append(("third message", now_ms)))
    while not events.is_over:
        events.run_next()
    assert heard == [
        ("early", 1.0),
        ("step end", 2.0),
        ("first message", 2.0),
        ("second message", 2.0),
        ("third message", 2.0),
        ("last message", 2.0),
        ("plan", 2.0),
    ]


def test_what_is_cancelled_does_not_happen_and_holds_nothing_up() -> None:
    events = EventQueue()
    cancelled = events.at(1.0, Rank.MESSAGE, lambda _: pytest.fail("it was cancelled"))
    cancelled.cancel()
    cancelled.cancel()
    assert events.is_over


def test_the_background_holds_nothing_up() -> None:
    events = EventQueue()
    heard: list[float] = []

    def tick(now_ms: float) -> None:
        heard.append(now_ms)
        events.at(now_ms + 10.0, Rank.WATCH, tick, background=True)

    events.at(0.0, Rank.WATCH, tick, background=True)
    events.at(25.0, Rank.MESSAGE, heard.append)
    while not events.is_over:
        events.run_next()
    assert heard == [0.0, 10.0, 20.0, 25.0]


def test_nothing_is_scheduled_in_the_past() -> None:
    events = EventQueue()
    events.at(5.0, Rank.MESSAGE, lambda _: None)
    events.run_next()
    with pytest.raises(IllegalTransition):
        events.at(4.0, Rank.MESSAGE, lambda _: None)
