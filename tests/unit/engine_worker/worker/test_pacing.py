import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.monitor_link import Pacing


def paced() -> Pacing:
    pacing = Pacing(interval_s=0.05, heartbeat_s=0.5)
    pacing.note_sent(10.0)
    return pacing


def test_the_first_report_is_due_at_once() -> None:
    assert Pacing(0.05, 0.5).due_in_s(0.0) <= 0


def test_without_steps_a_heartbeat_goes_out() -> None:
    pacing = paced()
    assert round(pacing.due_in_s(10.2), 6) == 0.3
    assert pacing.due_in_s(10.6) <= 0


def test_a_step_soon_after_a_report_waits_for_the_interval() -> None:
    pacing = paced()
    assert pacing.note_change() is True
    assert pacing.note_change() is False
    assert round(pacing.due_in_s(10.01), 6) == 0.04


def test_a_step_long_after_a_report_is_told_at_once() -> None:
    pacing = paced()
    pacing.note_change()
    assert pacing.due_in_s(10.2) <= 0


def test_urgent_news_do_not_wait() -> None:
    pacing = paced()
    pacing.note_urgent()
    assert pacing.due_in_s(10.001) <= 0
    pacing.note_sent(10.001)
    assert pacing.due_in_s(10.001) > 0.4


@given(st.floats(0.0, 1e6), st.floats(0.0, 0.6))
def test_whoever_waits_for_what_is_left_finds_the_clock_moved(sent_s: float, later_s: float) -> None:
    """Found by seed 5603: 7e-15 s were left, by which a clock does not move."""
    pacing = Pacing(interval_s=0.05, heartbeat_s=0.5)
    pacing.note_sent(sent_s)
    now_s = sent_s + later_s
    due_in_s = pacing.due_in_s(now_s)
    assert due_in_s <= 0 or now_s + due_in_s > now_s
    assert pacing.due_in_s(sent_s + 0.5) <= 0


def test_the_monitor_may_ask_for_fewer_reports_but_for_no_silence() -> None:
    pacing = Pacing(interval_s=0.05, heartbeat_s=0.5)
    for asked_s, pause_s in ((0.25, 0.25), (0.01, 0.05), (9.0, 0.5), (0.0, 0.05)):
        pacing.note_sent(10.0)
        pacing.note_change()
        pacing.note_asked(asked_s)
        assert pacing.due_in_s(10.0) == pytest.approx(pause_s)
    pacing.note_asked(0.25)
    pacing.note_urgent()
    assert pacing.due_in_s(10.0) == 0
