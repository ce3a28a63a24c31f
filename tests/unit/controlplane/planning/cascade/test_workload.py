"""The form in which workloads are kept."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.cascade.workload import read_workload, write_workload
from mesh.errors import ConfigurationError, TraceError
from tests.unit.controlplane.planning.cascade.analytic_source import random_sample

HEADER = b'{"rate_per_s": 2.0, "models": ["small", "large"]}'
REQUEST = b'{"input_tokens": 10, "output_tokens": [3, 4], "scores": [50, 90]}'


@given(seed=st.integers(0, 1000), tiers=st.integers(1, 4))
def test_what_is_written_is_read_back(seed: int, tiers: int) -> None:
    sample = random_sample(seed, 7, tiers)
    models = tuple(f"model-{tier}" for tier in range(tiers))
    names, read = read_workload(write_workload(models, sample))
    assert names == models
    assert read.rate_per_s == sample.rate_per_s
    for one, other in zip(
        (read.scores, read.input_tokens, read.output_tokens),
        (sample.scores, sample.input_tokens, sample.output_tokens),
        strict=True,
    ):
        assert np.array_equal(one, other)


def test_the_true_quality_is_kept_where_it_is_known() -> None:
    _, sample = read_workload([HEADER, REQUEST[:-1] + b', "quality": [0, 100]}'])
    assert sample.true_quality.tolist() == [[0, 100]]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no requests"),
        ([HEADER], "no requests"),
        ([REQUEST], "line 1"),
        ([HEADER, b"{"], "line 2"),
        ([HEADER, REQUEST, b'{"input_tokens": 10, "output_tokens": [3], "scores": [50, 90]}'], "line 3"),
        ([HEADER, REQUEST, REQUEST[:-1] + b', "quality": [0, 100]}'], "some requests only"),
    ],
)
def test_other_lines_are_refused_by_number(lines: list[bytes], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_workload(lines)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="rescale"):
        read_workload([HEADER, REQUEST.replace(b"90", b"900")])


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_are_read_or_refused(lines: list[bytes]) -> None:
    with pytest.raises((TraceError, ConfigurationError)):
        read_workload(lines)
