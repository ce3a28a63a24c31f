import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.errors import ConfigurationError
from simulator.reproductions.sustainable_rate import RateSearch, sustainable_rate


@given(st.floats(0.02, 200), st.floats(0.1, 100), st.floats(0.005, 0.3), st.floats(1.2, 4))
def test_finds_the_knee_to_the_tolerance(knee: float, start: float, tolerance: float, growth: float) -> None:
    search = RateSearch(start_scale=start, tolerance=tolerance, growth=growth)
    found = sustainable_rate(lambda scale: 0.95 if scale <= knee else 0.5, search)
    assert found.scale is not None
    assert not found.is_bound
    assert found.scale <= knee < found.scale * (1 + tolerance) * 1.000001
    assert len(found.probes) < 70
    assert list(found.probes) == sorted(found.probes)


def test_says_when_nothing_meets_the_target() -> None:
    found = sustainable_rate(lambda scale: 0.1, RateSearch())
    assert found.scale is None
    assert not found.is_bound
    assert found.probes[0][0] == RateSearch().lowest_scale


def test_says_when_the_highest_scale_still_meets_it() -> None:
    found = sustainable_rate(lambda scale: 1.0, RateSearch(start_scale=3, highest_scale=10))
    assert (found.scale, found.is_bound) == (10, True)


def test_refuses_limits_that_exclude_the_start() -> None:
    with pytest.raises(ConfigurationError, match="lowest"):
        RateSearch(start_scale=0.001)


@given(st.floats(0.5, 50), st.floats(0.05, 5), st.floats(0.01, 0.2))
def test_a_gentle_fall_is_found_in_few_probes(knee: float, steepness: float, tolerance: float) -> None:
    def attainment(scale: float) -> float:
        return 1 / (1 + (scale / knee) ** (steepness * 10) / 9)

    found = sustainable_rate(attainment, RateSearch(start_scale=5, growth=1.6, tolerance=tolerance))
    assert found.scale is not None
    assert found.scale <= knee * 1.000001 <= found.scale * (1 + tolerance) * 1.00001
    assert len(found.probes) <= 20
