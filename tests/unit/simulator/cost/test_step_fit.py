"""Costs fitted to steps: known coefficients come back, and the fitted model costs what was fitted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.model.step_sample import StepSample
from controlplane.planning.instance_profile import StepCoefficients
from controlplane.prediction.least_squares import non_negative_least_squares
from mesh.errors import ConfigurationError
from simulator.cost.fitted.step_cost import FittedStepCost
from simulator.cost.fitted.step_fit import (
    fit_and_validate_steps,
    fit_steps,
    step_features,
)
from simulator.cost.model import BatchShape, PrefillChunk

KNOWN = StepCoefficients(4.0, 0.5, 0.01, 1e-6, 0.25, 2e-4, 1e-3)


def shape(rng: np.random.Generator) -> BatchShape:
    contexts = rng.integers(1, 4000, rng.integers(1, 33))
    chunks = (PrefillChunk(int(rng.integers(1, 2048)), int(rng.integers(0, 4000))),) if rng.random() < 0.5 else ()
    return BatchShape(chunks, contexts, int(contexts.sum()))


def sample_of(batch: BatchShape, duration_ms: float) -> StepSample:
    return StepSample(
        duration_ms,
        sum(chunk.new_tokens for chunk in batch.prefill),
        sum(chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2) for chunk in batch.prefill),
        batch.decode_requests,
        batch.decode_context_tokens_sum,
        int(batch.decode_context_tokens.max()),
    )


def samples(seed: int, count: int = 400, noise: float = 0.0) -> list[StepSample]:
    rng = np.random.default_rng(seed)
    cost = FittedStepCost(KNOWN)
    shapes = [shape(rng) for _ in range(count)]
    return [sample_of(each, cost.step_ms(each) * float(rng.lognormal(0, noise))) for each in shapes]


@settings(deadline=None)
@given(seed=st.integers(0, 1000))
def test_known_coefficients_come_back(seed: int) -> None:
    fitted = fit_steps(samples(seed))
    for name in StepCoefficients.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(KNOWN, name), rel=1e-6), name


@pytest.mark.slow
def test_noise_does_not_pull_the_fit_below_the_mean() -> None:
    noisy = fit_and_validate_steps(samples(3, count=6000, noise=0.3), np.random.default_rng(0))
    assert abs(noisy.total_error) < 0.02
    assert noisy.relative_error == pytest.approx(0.25, abs=0.05), "that of the noise"
    assert (noisy.fitted_samples, noisy.held_out_samples) == (4500, 1500)


@settings(deadline=None)
@given(contexts=st.lists(st.integers(1, 9000), min_size=1, max_size=64), steps=st.integers(1, 40))
def test_a_run_costs_its_steps_to_the_last_bit(contexts: list[int], steps: int) -> None:
    cost = FittedStepCost(KNOWN)
    batch = BatchShape(decode_context_tokens=np.array(contexts), decode_context_tokens_sum=sum(contexts))
    one_by_one = [cost.step_ms(batch.decode_only_after(step)) for step in range(steps)]
    assert cost.decode_run_ms(batch, steps).tolist() == one_by_one


@settings(deadline=None)
@given(
    rows=st.lists(st.lists(st.floats(-5, 5), min_size=4, max_size=4), min_size=6, max_size=12),
    targets=st.lists(st.floats(-5, 5), min_size=12, max_size=12),
)
def test_the_solution_is_feasible_and_no_direction_improves_it(rows: list[list[float]], targets: list[float]) -> None:
    features, target = np.round(np.array(rows), 2), np.round(np.array(targets[: len(rows)]), 2)
    x = non_negative_least_squares(features, target)
    gradient = features.T @ (target - features @ x)
    scale = np.abs(features).sum() * (1 + np.abs(target).sum())
    assert (x >= 0).all()
    assert (gradient <= 1e-6 * scale + 1e-9).all()
    assert np.abs(gradient * x).max() <= 1e-5 * scale * (1 + x.max())


def test_features_are_in_the_order_of_the_coefficients() -> None:
    sample = StepSample(1.0, 2, 3.0, 4, 5, 6)
    assert step_features([sample]).tolist() == [[1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    assert len(StepCoefficients.__struct_fields__) == 7


def test_too_little_is_said() -> None:
    with pytest.raises(ConfigurationError, match="profile for longer"):
        fit_steps(samples(0, count=8))
    with pytest.raises(ConfigurationError, match="longer than 0"):
        fit_steps([StepSample(0.0, 0, 0.0, 1, 1, 1)] * 40)
