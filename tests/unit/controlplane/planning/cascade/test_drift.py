"""When to plan anew."""

from dataclasses import replace
from typing import Any

import pytest

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary, drift
from mesh.errors import ConfigurationError

USUAL = WorkloadSummary(
    rate_per_s=4.0, requests=50, input_tokens=1000.0, output_tokens=(200.0, 300.0), scores=(70.0, 90.0)
)
SETTINGS = DriftSettings(windows=2, pause_windows=0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rate_per_s": 8.0}, "rate"),
        ({"rate_per_s": 2.0}, "rate"),
        ({"input_tokens": 2000.0}, "prompt"),
        ({"output_tokens": (90.0, 300.0)}, "answer"),
        ({"scores": (50.0, 90.0)}, "score"),
    ],
)
def test_a_shift_that_lasts_is_named(change: dict[str, Any], what: str) -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    shifted = replace(USUAL, **change)
    assert detector.observe(shifted) == ""
    assert what in detector.observe(shifted)


def test_small_changes_and_single_bursts_are_not_drift() -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    burst = replace(USUAL, rate_per_s=40.0)
    for window in (replace(USUAL, rate_per_s=5.0, scores=(65.0, 90.0)), burst, USUAL, burst, USUAL):
        assert detector.observe(window) == ""


WINDOW_S = 300.0


def counted(requests: int, **changes: Any) -> WorkloadSummary:
    """A window in which so many came, all of them sampled up to 50."""
    return replace(USUAL, rate_per_s=requests / WINDOW_S, seconds=WINDOW_S, requests=min(50, requests), **changes)


@pytest.mark.parametrize("came", [3, 0])
def test_a_rate_that_falls_to_next_to_nothing_is_seen_however_few_are_sampled(came: int) -> None:
    detector = DriftDetector(counted(2400), SETTINGS)
    assert detector.observe(counted(came)) == ""
    assert "the request rate went from 8 to" in detector.observe(counted(came))


@pytest.mark.parametrize(("planned_for", "came"), [(3, 5), (3, 0), (15, 20), (20, 15), (60, 75)])
def test_rates_that_may_differ_by_chance_have_not_moved(planned_for: int, came: int) -> None:
    detector = DriftDetector(counted(planned_for), SETTINGS)
    for _ in range(4):
        assert detector.observe(counted(came)) == ""


def test_a_small_window_neither_counts_nor_ends_a_shift_of_scores_but_ends_one_of_the_rate() -> None:
    quiet, harder, burst = counted(15), counted(30, scores=(40.0, 90.0)), counted(90)
    usual = counted(20)
    detector = DriftDetector(usual, SETTINGS)
    assert [bool(detector.observe(window)) for window in (harder, quiet, harder)] == [False, False, True]
    detector = DriftDetector(usual, SETTINGS)
    assert [bool(detector.observe(window)) for window in (burst, quiet, burst)] == [False, False, False]


def test_scores_are_compared_on_the_smallest_tier_that_answered_both_times() -> None:
    first_gone = replace(USUAL, output_tokens=(None, 300.0), scores=(None, 90.0))
    settings = replace(SETTINGS, windows=1)
    assert drift(USUAL, first_gone, settings) == ""
    assert drift(USUAL, replace(first_gone, scores=(None, 70.0)), settings) == "tier 2's mean score went from 90 to 70"
    assert "the mean answer" in drift(USUAL, replace(first_gone, output_tokens=(None, 100.0)), settings)
    nobody = replace(USUAL, output_tokens=(None, None), scores=(None, None))
    assert drift(USUAL, nobody, settings) == ""
    assert "prompt" in drift(USUAL, replace(nobody, input_tokens=10.0), settings)


def test_windows_with_few_requests_and_no_count_of_them_say_nothing() -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    for _ in range(5):
        assert detector.observe(replace(USUAL, rate_per_s=40.0, requests=3)) == ""


@pytest.mark.parametrize("made", [True, False])
def test_after_a_decision_there_is_a_pause(made: bool) -> None:
    detector = DriftDetector(USUAL, DriftSettings(windows=1, pause_windows=2))
    shifted = replace(USUAL, rate_per_s=8.0)
    for _ in range(2):
        assert detector.observe(shifted) == ""
    assert detector.observe(shifted)
    if made:
        detector.on_new_plan(shifted)
    else:
        detector.on_plan_refused()
    again = USUAL if made else shifted
    assert [bool(detector.observe(again)) for _ in range(3)] == [False, False, True]


def test_settings_that_would_always_or_never_fire_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ratio"):
        DriftSettings(ratio=1.0)
