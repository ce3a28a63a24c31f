"""What an instance takes its own speed for."""

import pytest

from controlplane.model.step_sample import StepSample
from engine_worker.prefix_pull.speed import LEAST_STEP_TOKENS, SHARE, UNKNOWN_MS, PromptSpeed


def step(tokens: int, duration_ms: float) -> StepSample:
    return StepSample(duration_ms, tokens, 0.0, 0, 0, 0)


def test_what_was_never_measured_is_unknown() -> None:
    speed = PromptSpeed()
    speed.computed(step(LEAST_STEP_TOKENS - 1, 100.0))
    speed.pulled(0, 100.0)
    assert speed.compute_ms(1_000) == UNKNOWN_MS
    assert speed.pull_token_ms is None


def test_measurements_are_averaged_with_the_latest_counting_most() -> None:
    speed = PromptSpeed()
    speed.computed(step(100, 50.0))
    assert speed.compute_ms(1_000) == pytest.approx(500.0)
    speed.computed(step(200, 200.0))
    assert speed.compute_ms(1_000) == pytest.approx(500.0 + SHARE * 500.0)
    speed.pulled(1_000, 10.0)
    speed.pulled(100, 2.0)
    assert speed.pull_token_ms == pytest.approx(0.01 + SHARE * 0.01)
