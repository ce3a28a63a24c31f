"""The sliding mean of the time between tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.token_intervals import SLICE_MS, SLICES, TokenIntervals


def test_each_request_weighs_alike() -> None:
    intervals = TokenIntervals()
    assert intervals.mean_ms() == 0.0
    intervals.add(3, 100.0, 110.0)
    intervals.add(1, 110.0, 140.0)
    assert intervals.mean_ms() == 15.0


def test_several_tokens_at_once_share_the_wait() -> None:
    intervals = TokenIntervals()
    intervals.add(1, 0.0, 40.0, tokens_each=4)
    assert intervals.mean_ms() == 10.0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    intervals = TokenIntervals()
    intervals.add(1, 0.0, 400.0)
    intervals.add(1, 400.0, 500.0)
    assert intervals.mean_ms() == 250.0
    intervals.add(0, 500.0, SLICES * SLICE_MS)
    assert intervals.mean_ms() == 100.0
    intervals.add(0, 0.0, 10 * SLICES * SLICE_MS)
    assert intervals.mean_ms() == 0.0


def test_late_news_counts_as_the_latest() -> None:
    intervals = TokenIntervals()
    intervals.add(1, 9_000.0, 9_010.0)
    intervals.add(1, 10.0, 40.0)
    assert intervals.mean_ms() == 20.0


@given(
    durations_ms=st.lists(st.floats(0.01, 2_000.0), min_size=1, max_size=60),
    requests=st.integers(1, 9),
    started_ms=st.floats(0.0, 10_000.0),
)
def test_a_run_equals_its_steps(durations_ms: list[float], requests: int, started_ms: float) -> None:
    one_by_one, at_once = TokenIntervals(), TokenIntervals()
    ends_ms = []
    now_ms = started_ms
    for duration_ms in durations_ms:
        one_by_one.add(requests, now_ms, now_ms + duration_ms)
        now_ms += duration_ms
        ends_ms.append(now_ms)
    at_once.add_run(requests, started_ms, np.array(ends_ms))
    assert at_once.mean_ms() == one_by_one.mean_ms()


def test_a_steady_rhythm_is_its_own_mean() -> None:
    intervals = TokenIntervals()
    for step in range(2_000):
        intervals.add(4, 12.5 * step, 12.5 * (step + 1))
    assert intervals.mean_ms() == pytest.approx(12.5)
