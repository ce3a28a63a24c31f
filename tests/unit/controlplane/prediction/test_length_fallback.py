"""The mean residual life of requests, and the truth spoilt for simulations."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.length_error import LengthErrorModel
from controlplane.prediction.length_fallback import FEWEST_SURVIVORS, REMEMBERED, MeanResidual
from mesh.errors import ConfigurationError


def test_nothing_is_said_before_anything_ended() -> None:
    assert MeanResidual().remaining(0) is None


@given(st.lists(st.integers(1, 500), min_size=1, max_size=80), st.integers(0, 700))
def test_it_is_the_mean_over_those_that_lived_longer(lengths: list[int], age: int) -> None:
    residual = MeanResidual()
    for length in lengths:
        residual.ended(length)
    survivors = [length for length in lengths if length > age]
    said = residual.remaining(age)
    assert said is not None
    assert said >= 1
    if len(survivors) >= FEWEST_SURVIVORS:
        assert said == max(1, round(sum(survivors) / len(survivors) - age))


def test_one_that_is_older_than_all_is_as_those_that_lived_longest() -> None:
    residual = MeanResidual()
    for length in [10] * 50 + [100] * FEWEST_SURVIVORS:
        residual.ended(length)
    assert residual.remaining(20) == 80
    assert residual.remaining(5000) == residual.remaining(99) == 1


def test_old_requests_are_forgotten() -> None:
    residual = MeanResidual()
    for length in [1000] * REMEMBERED + [10] * REMEMBERED:
        residual.ended(length)
    assert residual.remaining(0) == 10


@pytest.mark.slow
@given(st.text(max_size=8), st.integers(0, 1000), st.integers(1, 10_000), st.integers(0, 9))
def test_an_oracle_says_the_truth_and_others_repeat_themselves(
    request_id: str, generated: int, remaining: int, seed: int
) -> None:
    assert LengthErrorModel(sigma=0.0).predict(request_id, generated, remaining) == remaining
    model = LengthErrorModel(sigma=0.8, seed=seed)
    said = model.predict(request_id, generated, remaining)
    assert said == model.predict(request_id, generated, remaining) >= 1


@pytest.mark.parametrize("persistence", [0.0, 0.5, 1.0])
def test_errors_are_lognormal_of_median_1(persistence: float) -> None:
    model = LengthErrorModel(sigma=0.5, persistence=persistence)
    logs = np.array(
        [[math.log(model.predict(f"r{r}", 20 * g, 100_000) / 100_000) for g in range(5)] for r in range(2000)]
    )
    assert logs.mean() == pytest.approx(0.0, abs=0.03)
    assert logs.std() == pytest.approx(0.5, rel=0.05)
    # What persists is the share of the variance that lies between requests.
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 5
    assert between / 0.25 == pytest.approx(persistence, abs=0.08)


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="sigma >= 0"):
        LengthErrorModel(sigma=-1)
    with pytest.raises(ConfigurationError, match="persistence within"):
        LengthErrorModel(persistence=2)
