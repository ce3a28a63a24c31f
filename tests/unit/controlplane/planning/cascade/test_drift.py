"""When to plan anew."""

from dataclasses import replace

import pytest

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
from mesh.errors import ConfigurationError

USUAL = WorkloadSummary(rate_per_s=4.0, input_tokens=1000, output_tokens=200, score=70, requests=50)
SETTINGS = DriftSettings(windows=2, pause_windows=0)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"rate_per_s": 8.0}, "rate"),
        ({"rate_per_s": 2.0}, "rate"),
        ({"input_tokens": 2000.0}, "prompt"),
        ({"output_tokens": 90.0}, "answer"),
        ({"score": 50.0}, "score"),
    ],
)
def test_a_shift_that_lasts_is_named(change: dict[str, float], what: str) -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    moved = replace(USUAL, **change)
    assert detector.seen(moved) == ""
    assert what in detector.seen(moved)


def test_small_changes_and_single_bursts_are_not_drift() -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    burst = replace(USUAL, rate_per_s=40.0)
    for window in (replace(USUAL, rate_per_s=5.0, score=65.0), burst, USUAL, burst, USUAL):
        assert detector.seen(window) == ""


def test_windows_with_few_requests_say_nothing() -> None:
    detector = DriftDetector(USUAL, SETTINGS)
    for _ in range(5):
        assert detector.seen(replace(USUAL, rate_per_s=40.0, requests=3)) == ""


@pytest.mark.parametrize("made", [True, False])
def test_after_a_decision_there_is_a_pause(made: bool) -> None:
    detector = DriftDetector(USUAL, DriftSettings(windows=1, pause_windows=2))
    moved = replace(USUAL, rate_per_s=8.0)
    for _ in range(2):
        assert detector.seen(moved) == ""
    assert detector.seen(moved)
    if made:
        detector.replanned(moved)
    else:
        detector.refused()
    again = USUAL if made else moved
    assert [bool(detector.seen(again)) for _ in range(3)] == [False, False, True]


def test_settings_that_would_always_or_never_fire_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="ratio"):
        DriftSettings(ratio=1.0)
