from controlplane.model.instance import LoadReport
from engine_worker.liveness import HangDetector

STILL = LoadReport(running_requests=1)


def test_an_idle_engine_never_hangs() -> None:
    detector = HangDetector(5.0)
    assert not any(detector.observe(float(now_s), busy=False, load=STILL) for now_s in range(100))


def test_a_busy_engine_without_steps_hangs_after_the_bound_and_recovers_with_a_step() -> None:
    detector = HangDetector(5.0)
    assert not detector.observe(0.0, busy=True, load=STILL)
    assert not detector.observe(5.0, busy=True, load=STILL)
    assert detector.observe(5.1, busy=True, load=STILL)
    assert detector.hung
    assert not detector.observe(6.0, busy=True, load=STILL)
    detector.note_step(6.1)
    assert detector.observe(6.2, busy=True, load=STILL)
    assert not detector.hung


def test_steps_that_bring_no_token_show_in_the_totals() -> None:
    detector = HangDetector(5.0)
    for step in range(20):
        load = LoadReport(running_requests=1, prefilled_tokens_total=512 * step)
        assert not detector.observe(3.0 * step, busy=True, load=load)


def test_new_requests_alone_are_no_progress() -> None:
    detector = HangDetector(5.0)
    detector.observe(0.0, busy=True, load=STILL)
    assert detector.observe(5.1, busy=True, load=LoadReport(running_requests=1, queued_requests=9))
