"""The pace of a machine by the clock: moments of slowness count by their length, not by their steps."""

import pytest

from controlplane.model.step_sample import StepSample
from controlplane.planning.instance_profile import StepCoefficients
from simulator.validation.slowdown import wall_clock_slowdown

TEN_MS = StepCoefficients(fixed_ms=10.0)


def steps(duration_ms: float, time_ms: float) -> list[StepSample]:
    return [StepSample(duration_ms, 0, 0.0, 1, 100, 100)] * round(time_ms / duration_ms)


def test_an_even_pace_is_one_even_where_steps_vary() -> None:
    varied = [StepSample(duration, 0, 0.0, 1, 100, 100) for duration in (5.0, 15.0)] * 500
    assert wall_clock_slowdown([steps(10.0, 5000)], TEN_MS) == pytest.approx(1.0)
    assert wall_clock_slowdown([varied], TEN_MS) == pytest.approx(1.0, abs=0.02)


def test_slow_moments_count_by_their_length() -> None:
    # Half of the time five times as slow, a sixth of the steps; what begins at the border meets both.
    half_slow = [steps(10.0, 50_000), steps(50.0, 50_000)]
    assert wall_clock_slowdown(half_slow, TEN_MS) == pytest.approx(3.0, rel=0.03)


def test_a_fit_to_all_steps_is_scaled_to_the_clock() -> None:
    mean_step = StepCoefficients(fixed_ms=100_000 / 6000)
    paces = wall_clock_slowdown([steps(10.0, 50_000), steps(50.0, 50_000)], mean_step)
    assert paces * mean_step.fixed_ms == pytest.approx(30.0, rel=0.03), "the mean step of a moment, whichever it is"


def test_a_stall_delays_those_who_meet_it_and_no_others() -> None:
    stalled = [steps(10.0, 50_000), steps(5000.0, 5000), steps(10.0, 45_000)]
    # Who comes within the stall waits half of it on average, who runs into it all of it.
    expected = 1 + (5000 * 2500 + 500 * 5000) / 500 / 100_000
    assert wall_clock_slowdown(stalled, TEN_MS) == pytest.approx(expected, rel=0.05)


def test_nothing_measured_changes_nothing() -> None:
    assert wall_clock_slowdown([], TEN_MS) == 1.0
    assert wall_clock_slowdown([[]], TEN_MS) == 1.0
