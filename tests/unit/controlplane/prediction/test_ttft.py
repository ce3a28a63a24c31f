import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.running_tokens import DecodePoint, max_running_tokens
from controlplane.prediction.ttft import TtftCurve, TtftPoint, fit_ttft
from mesh.errors import ConfigurationError

CURVES = st.builds(TtftCurve, st.floats(1, 50), st.floats(0.01, 0.5), st.floats(1e-7, 1e-5))
LENGTHS = (32, 128, 512, 2048, 8192, 32_768)


@given(CURVES)
def test_the_fit_finds_the_curve_that_made_the_points(curve: TtftCurve) -> None:
    fitted = fit_ttft([TtftPoint(tokens, curve.prefill_ms(tokens)) for tokens in LENGTHS])
    for tokens in (100, 3000, 20_000):
        assert fitted.prefill_ms(tokens) == pytest.approx(curve.prefill_ms(tokens), rel=1e-6)


@given(st.lists(st.floats(0.5, 5000), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_no_profile_makes_a_longer_prompt_cheaper(times_ms: list[float]) -> None:
    fitted = fit_ttft([TtftPoint(*point) for point in zip(LENGTHS, times_ms, strict=True)])
    assert min(fitted.fixed_ms, fitted.token_ms, fitted.token_squared_ms) >= 0
    predicted = [fitted.prefill_ms(tokens) for tokens in LENGTHS]
    assert predicted == sorted(predicted)
    # No worse than the best constant, in relative terms, which is in the family too.
    times = np.array(times_ms)
    constant = (1 / times).sum() / (1 / times**2).sum()
    error = ((np.array(predicted) / times - 1) ** 2).sum()
    assert error <= ((constant / times - 1) ** 2).sum() * (1 + 1e-6) + 1e-9


@given(CURVES, st.integers(1, 5000), st.integers(0, 5000), st.integers(0, 5000))
def test_parts_add_up_to_the_whole(curve: TtftCurve, new: int, cached: int, first: int) -> None:
    first = min(first, new)
    parts = curve.part_ms(first, cached) + curve.part_ms(new - first, cached + first)
    assert curve.fixed_ms + parts == pytest.approx(curve.prefill_ms(new, cached))


@pytest.mark.parametrize(
    "points",
    [
        [TtftPoint(10, 1.0), TtftPoint(10, 1.0), TtftPoint(20, 2.0)],
        [TtftPoint(10, 1.0), TtftPoint(15, 0.0), TtftPoint(20, 2.0)],
        [TtftPoint(0, 1.0), TtftPoint(15, 1.0), TtftPoint(20, 2.0)],
    ],
)
def test_what_is_no_profile_is_refused(points: list[TtftPoint]) -> None:
    with pytest.raises(ConfigurationError, match="TTFT"):
        fit_ttft(points)


def test_running_tokens_are_those_within_the_tpot() -> None:
    points = [DecodePoint(1000, 10.0), DecodePoint(11_000, 20.0), DecodePoint(21_000, 60.0)]
    assert max_running_tokens(points, tpot_ms=15, kv_tokens=10**6) == 6000
    assert max_running_tokens(points, tpot_ms=40, kv_tokens=10**6) == 16_000
    assert max_running_tokens(points, tpot_ms=40, kv_tokens=5000) == 5000
    assert max_running_tokens(points, tpot_ms=85, kv_tokens=10**6) == 31_000
    assert max_running_tokens(points, tpot_ms=5, kv_tokens=10**6) == 0
    with pytest.raises(ConfigurationError, match="two"):
        max_running_tokens(points[:1], 10, 10)


def test_more_tokens_that_take_no_more_time_leave_memory_as_the_limit() -> None:
    points = [DecodePoint(1000, 10.0), DecodePoint(2000, 9.0)]
    assert max_running_tokens(points, tpot_ms=15, kv_tokens=123_456) == 123_456
