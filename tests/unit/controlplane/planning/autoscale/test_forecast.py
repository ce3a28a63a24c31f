"""Rates of the time ahead, by what came before."""

from math import pi, sin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.autoscale.forecast import DAY_S, RateForecaster

BUCKET_S = 300.0
DAY = round(DAY_S / BUCKET_S)


def _daily(bucket: int) -> float:
    return 10 + 8 * sin(2 * pi * bucket / DAY)


def test_nothing_seen_means_nothing_expected() -> None:
    assert RateForecaster(60, 3).forecast(0.9).upper_per_s == 0


def test_a_day_that_repeats_is_foreseen() -> None:
    forecaster, ahead = RateForecaster(BUCKET_S, 6), 6
    for bucket in range(3 * DAY + DAY // 8):
        forecaster.add(_daily(bucket))
    found = forecaster.forecast(0.9)
    truth = max(_daily(bucket) for bucket in range(3 * DAY + DAY // 8, 3 * DAY + DAY // 8 + ahead))
    assert found.predictor == "day"
    assert found.expected_per_s == pytest.approx(truth, rel=0.05)
    assert found.relative_error < 0.05


def test_a_quantile_bounds_so_many_of_the_truths() -> None:
    forecaster, below, asked = RateForecaster(60, 1), 0, 0
    rate = 10.0
    for step in range(600):
        if step > 200:
            upper = forecaster.forecast(0.9).upper_per_s
        noise = ((step * 7919) % 101) / 101
        rate = 10 * (0.8 + 0.4 * noise)
        if step > 200:
            asked, below = asked + 1, below + (rate <= upper)
        forecaster.add(rate)
    assert 0.85 <= below / asked <= 0.97


@given(st.lists(st.floats(0, 1e4), max_size=80), st.integers(1, 8))
def test_any_rates_give_a_forecast_within_reason(rates: list[float], ahead: int) -> None:
    forecaster = RateForecaster(60, ahead)
    for rate in rates:
        forecaster.add(rate)
        forecaster.validate()
        assert 0 <= forecaster.forecast(0.9).upper_per_s < 1e12
