from hypothesis import given
from hypothesis import strategies as st

from controlplane.deployment.restarts import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_RESTARTS_IN_WINDOW,
    WINDOW_S,
    RestartHistory,
)


def test_the_delay_doubles_up_to_the_bound_and_then_it_gives_up() -> None:
    history = RestartHistory()
    delays = [history.next_delay_s(0.0) for _ in range(MAX_RESTARTS_IN_WINDOW)]
    assert delays[:3] == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert max(delay for delay in delays if delay is not None) == MAX_BACKOFF_S
    assert history.next_delay_s(0.0) is None


def test_a_quiet_window_forgives() -> None:
    history = RestartHistory()
    while history.next_delay_s(0.0) is not None:
        pass
    assert history.next_delay_s(WINDOW_S) is None
    assert history.next_delay_s(WINDOW_S + 1) == FIRST_BACKOFF_S


def test_it_gives_up_however_late_the_process_begins_to_end() -> None:
    history = RestartHistory()
    for _ in range(MAX_RESTARTS_IN_WINDOW):
        assert history.next_delay_s(5000.0) is not None
    assert history.next_delay_s(5001.0) is None


@given(st.lists(st.floats(0, 1000), max_size=60))
def test_never_more_restarts_in_a_window_than_allowed(gaps_s: list[float]) -> None:
    history, now_s, restarted_s = RestartHistory(), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        if history.next_delay_s(now_s) is not None:
            restarted_s.append(now_s)
    for start_s in restarted_s:
        assert sum(start_s <= at_s <= start_s + WINDOW_S for at_s in restarted_s) <= MAX_RESTARTS_IN_WINDOW
