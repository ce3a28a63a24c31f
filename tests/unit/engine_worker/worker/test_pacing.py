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
