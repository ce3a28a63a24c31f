"""The QoE model: the fit finds what made the samples, never a negative coefficient, and says how wrong it is."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planning.qoe import (
    BatchLoad,
    QoeModel,
    QoeSample,
    features,
    fit_and_validate,
    fit_qoe,
    relative_error,
)
from mesh.errors import ConfigurationError

TRUE = QoeModel(8.0, 0.03, 2e-4, 3e-8, 1e-4)


def loads(rng: np.random.Generator, count: int) -> list[BatchLoad]:
    found = []
    for _ in range(count):
        requests = int(2 ** rng.integers(0, 8))
        inputs = rng.integers(50, 4000, requests)
        outputs = rng.integers(1, 800, requests)
        found.append(
            BatchLoad(requests, float(inputs.sum()), float((inputs**2).sum()), float((inputs + outputs).sum()))
        )
    return found


def samples(model: QoeModel, seed: int, count: int = 80, noise: float = 0.0) -> list[QoeSample]:
    rng = np.random.default_rng(seed)
    return [
        QoeSample(load, model.normalised_latency_ms(load) * float(np.exp(rng.normal(0, noise))))
        for load in loads(rng, count)
    ]


@pytest.mark.parametrize("relative", [False, True])
def test_the_fit_finds_what_made_the_samples(relative: bool) -> None:
    fitted = fit_qoe(samples(TRUE, 1), relative=relative)
    np.testing.assert_allclose(fitted.coefficients, TRUE.coefficients, rtol=1e-4)


coefficient = st.floats(0, 10, allow_subnormal=False)


@settings(deadline=None)
@given(st.tuples(*[coefficient] * 5), st.integers(0, 2**16), st.floats(0, 1))
def test_no_coefficient_is_negative_and_none_better_is_near(
    d: tuple[float, float, float, float, float], seed: int, noise: float
) -> None:
    made = samples(QoeModel(d[0] + 0.1, d[1], d[2] * 1e-3, d[3] * 1e-7, d[4] * 1e-3), seed, 30, noise)
    fitted = fit_qoe(made, relative=False).coefficients
    assert (fitted >= 0).all()
    table = features([sample.load for sample in made])
    measured = np.array([sample.normalised_latency_ms for sample in made])
    error = np.sum((table @ fitted - measured) ** 2)
    scale = np.linalg.norm(measured) / np.linalg.norm(table, axis=0)
    for column in range(5):
        for step in (-1e-3, 1e-3):
            other = fitted.copy()
            other[column] = max(0.0, other[column] + step * scale[column])
            assert np.sum((table @ other - measured) ** 2) >= error * (1 - 1e-9) - 1e-9


def test_a_held_out_part_is_predicted_better_than_by_the_mean() -> None:
    fit = fit_and_validate(samples(TRUE, 2, 400, noise=0.1), np.random.default_rng(0))
    assert (fit.fitted_samples, fit.held_out_samples) == (300, 100)
    assert fit.relative_error < 0.15 < fit.static_relative_error


def test_the_same_seed_gives_the_same_fit() -> None:
    made = samples(TRUE, 3, 50, noise=0.2)
    first, second = (fit_and_validate(made, np.random.default_rng(7)) for _ in range(2))
    assert first == second


def test_the_model_itself_has_no_error() -> None:
    assert relative_error(TRUE, samples(TRUE, 4)) == pytest.approx(0)


def test_batch_quality_is_the_sum_over_the_requests() -> None:
    made = loads(np.random.default_rng(5), 6)
    table = features(made)[:, 1:].reshape(2, 3, 4)
    expected = [load.requests * TRUE.normalised_latency_ms(load) for load in made]
    np.testing.assert_allclose(TRUE.batch_quality(table), np.reshape(expected, (2, 3)))


def test_a_feature_that_never_varies_does_no_harm() -> None:
    made = [QoeSample(BatchLoad(1, 0, 0, 10.0 * k), 5 + 0.1 * k) for k in range(20)]
    fitted = fit_qoe(made)
    assert fitted.normalised_latency_ms(BatchLoad(1, 0, 0, 500)) == pytest.approx(10)


def test_a_model_survives_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(TRUE), type=QoeModel) == TRUE


@pytest.mark.parametrize("count", [0, 9])
def test_too_few_samples_are_refused(count: int) -> None:
    with pytest.raises(ConfigurationError, match="too few"):
        fit_qoe(samples(TRUE, 1, count))


def test_a_latency_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="more than 0"):
        fit_qoe([QoeSample(BatchLoad(1, 1, 1, 1), 0.0)] * 12)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_some_samples_must_be_held_out(share: float) -> None:
    with pytest.raises(ConfigurationError, match="held_out_share"):
        fit_and_validate(samples(TRUE, 1), np.random.default_rng(0), held_out_share=share)
