import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cluster.report_times import Grid, JustInTime


def test_a_grid_by_hand() -> None:
    times = Grid(interval_ms=10.0, delay_ms=2.0, phase_ms=3.0)
    assert [times.seen_at(now_ms) for now_ms in (38.0, 39.0, 75.0)] == [33.0, 33.0, 73.0]
    assert times.seen_at(4.9) < 0
    assert times.in_flight(0.0, 34.0) == [33.0]
    assert times.in_flight(33.0, 34.0) == times.in_flight(0.0, 36.0) == []
    assert times.next_seen(33.0) == pytest.approx(45.0)


def test_just_in_time_by_hand() -> None:
    times = JustInTime(4.0, [1.0, 5.0, 9.0])
    assert times.seen_at(5.0) == 1.0
    assert times.in_flight(-1.0, 1.0) == [1.0]
    assert times.in_flight(1.0, 6.0) == [5.0]


@given(
    interval_ms=st.floats(1.0, 60.0),
    delay_ms=st.floats(0.0, 150.0, allow_subnormal=False),
    share=st.floats(0.0, 1.0, exclude_max=True),
    changes_ms=st.lists(st.floats(0.0, 500.0), min_size=1, max_size=20),
    looks_ms=st.lists(st.floats(0.0, 700.0), min_size=1, max_size=20),
)
def test_whoever_looks_finds_the_report_that_a_full_grid_would_have_brought(
    interval_ms: float, delay_ms: float, share: float, changes_ms: list[float], looks_ms: list[float]
) -> None:
    """Reports are made when something changes (those that left before) and when somebody looks."""
    phase_ms = share * interval_ms
    times = Grid(interval_ms, delay_ms, phase_ms)
    made: set[float] = set()
    done_ms = -1.0
    moments = sorted([(at_ms, "change") for at_ms in changes_ms] + [(at_ms, "look") for at_ms in looks_ms])
    for now_ms, kind in moments:
        seen_ms = times.seen_at(now_ms)
        if seen_ms > done_ms and seen_ms >= 0:
            made.add(seen_ms)
        if kind == "change":
            made.update(times.in_flight(done_ms, now_ms))
            done_ms = now_ms
            continue
        grid_ms = np.floor((now_ms - delay_ms - phase_ms) / interval_ms) * interval_ms + phase_ms
        arrived = [sent_ms for sent_ms in made if sent_ms <= now_ms - delay_ms]
        latest_change_ms = max((at_ms for at_ms, what in moments if what == "change" and at_ms < grid_ms), default=-1.0)
        # Since the change before it, this report or a later one of the same state was made.
        if grid_ms >= 0:
            assert arrived
            assert max(arrived) > latest_change_ms or max(arrived) == pytest.approx(grid_ms)
