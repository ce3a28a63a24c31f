"""The form in which workloads are kept."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.planning.cascade import workload
from controlplane.planning.cascade.labels import with_labels
from controlplane.planning.cascade.workload import (
    WorkloadRequest,
    WorkloadWindow,
    read_window,
    read_workload,
    sample_of_window,
    write_window,
    write_workload,
)
from mesh.errors import ConfigurationError, TraceError
from tests.unit.controlplane.planning.cascade.analytic_source import random_sample, with_score_bounds

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


@given(seed=st.integers(0, 1000), tiers=st.integers(1, 4))
def test_score_bounds_are_read_back(seed: int, tiers: int) -> None:
    sample = with_score_bounds(random_sample(seed, 7, tiers), seed)
    _, read = read_workload(write_workload(tuple(f"model-{tier}" for tier in range(tiers)), sample))
    assert read.score_bounds == sample.score_bounds
    for tier in range(tiers):
        assert (read.tokens(tier, 50.0) == sample.tokens(tier, 50.0)).all()


def test_score_bounds_of_the_last_model_may_be_missing() -> None:
    _, sample = read_workload([HEADER, REQUEST[:-1] + b', "score_bounds": [[[1, 70.5], [3, 50]], []]}'])
    assert sample.score_bounds == ((((1, 70.5), (3, 50.0)), ()),)
    assert [sample.tokens(0, threshold).tolist() for threshold in (50.0, 60.0, 80.0)] == [[3], [3], [1]]


def test_score_bounds_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "MAX_SCORE_BOUNDS", 3)
    falling = REQUEST[:-1] + b', "score_bounds": [[[1, 70.5], [3, 50]], []]}'
    assert read_workload([HEADER, falling])[1].requests == 1
    with pytest.raises(TraceError, match=r"line 3: .* at most 3 score_bounds"):
        read_workload([HEADER, falling, falling])


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
        (
            [HEADER, REQUEST, REQUEST[:-1] + b', "quality": [0, 101]}'],
            "line 3 of the workload: labels go from 0 to 100",
        ),
        ([HEADER, REQUEST[:-1] + b', "quality": [0]}'], "line 2 .* each of the 2 models"),
        ([HEADER, REQUEST, REQUEST[:-1] + b', "score_bounds": [[[3, 50]], []]}'], "score_bounds of some requests only"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[[3, 50]]]}'], "line 2 .* each of the 2 models"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[], []]}'], "line 2 of the workload, model 1: .* 100, not 50"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[[3, 50]], [[4, 91]]]}'], "model 2: .* 91, not 90"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[[4, 50]], []]}'], "model 1: .* answer of 3 tokens"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[[2, 50], [1, 50]], []]}'], "model 1: .*ascending tokens"),
        ([HEADER, REQUEST[:-1] + b', "score_bounds": [[[2, 50, 1]], []]}'], "line 2 of the workload"),
    ],
)
def test_other_lines_are_refused_by_number(lines: list[bytes], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_workload(lines)


def test_values_out_of_range_are_refused() -> None:
    with pytest.raises(TraceError, match=r"line 2 .*rescale"):
        read_workload([HEADER, REQUEST.replace(b"90", b"900")])
    with pytest.raises(TraceError, match=r"line 2 .*at least one input"):
        read_workload([HEADER, REQUEST.replace(b"[3, 4]", b"[3, 0]")])
    with pytest.raises(TraceError, match=r"line 1 .*not below 0"):
        read_workload([HEADER.replace(b"2.0", b"-2.0"), REQUEST])


def test_a_window_may_lack_answers_and_requests_but_a_workload_may_not() -> None:
    absent = WorkloadRequest(10, (None, 4), (None, 90.0), score_bounds=(None, ()))
    for window in (
        WorkloadWindow(("small", "large"), 0.0, ()),
        WorkloadWindow(
            ("small", "large"), 2.0, (absent, WorkloadRequest(7, (1, 4), (50.0, 90.0), score_bounds=(((1, 50.0),), ())))
        ),
    ):
        lines = write_window(window)
        assert read_window(lines) == window
        with pytest.raises(TraceError, match=r"no requests|lacks the answer of a model"):
            read_workload(lines)


@pytest.mark.parametrize(
    ("request_line", "words"),
    [
        (b'{"input_tokens": 10, "output_tokens": [null, 4], "scores": [50, 90]}', "no values at all"),
        (b'{"input_tokens": 10, "output_tokens": [null, null], "scores": [null, null]}', "no model has answered"),
        (
            b'{"input_tokens": 10, "output_tokens": [null, 4], "scores": [null, 90], "score_bounds": [[], []]}',
            "no values at all",
        ),
    ],
)
def test_a_model_answers_wholly_or_not_at_all(request_line: bytes, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        read_window([HEADER, request_line])


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_any_bytes_are_read_or_refused(lines: list[bytes]) -> None:
    with pytest.raises((TraceError, ConfigurationError)):
        read_workload(lines)


def test_an_answer_without_a_label_counts_for_what_its_score_is_worth() -> None:
    def request(score: float, label: float | None) -> WorkloadRequest:
        return WorkloadRequest(10, (3, 4), (score, 90.0), (label, 100.0), request_id=f"request-{score}")

    window = WorkloadWindow(
        ("small", "large"), 2.0, (request(10, 0), request(30, 100), request(20, None)), "confidence", "exact"
    )
    read = read_window(write_window(window))
    assert read == window, "with whose scores and labels these are"
    sample = sample_of_window(read)
    assert sample.true_quality[:, 0].tolist() == [0.0, 100.0, 50.0]
    assert sample.is_labelled.tolist() == [[True, True], [True, True], [False, True]]
    assert [each.samples for each in sample.calibrations() if each] == [2, 3]
    again = read_window(write_workload(window.models, sample, "confidence", "exact"))
    assert [each.quality for each in again.requests] == [each.quality for each in window.requests]
    unlabelled = tuple(msgspec.structs.replace(each, quality=(None, 100.0)) for each in window.requests)
    with pytest.raises(ConfigurationError, match="no answer of model 1 has a label"):
        sample_of_window(replace(window, requests=unlabelled))


def test_labels_are_brought_in_by_request() -> None:
    window = WorkloadWindow(
        ("small", "large"),
        2.0,
        tuple(WorkloadRequest(10, (3, 4), (50.0, 90.0), request_id=name) for name in "ab"),
        "confidence",
    )
    labelled = with_labels(window, [b'{"request_id": "b", "quality": [0, null]}', b""], "people.jsonl")
    assert [each.quality for each in labelled.requests] == [None, (0.0, None)]
    assert (labelled.judge, labelled.label) == ("confidence", "people.jsonl")
    for line, words in (
        (b'{"request_id": "c", "quality": [0, 1]}', "1 requests that the workload does not have"),
        (b'{"request_id": "b", "quality": [0]}', "line 1 .* each of small, large"),
        (b'{"request_id": "b", "quality": [0, 101]}', "line 1 .* 0 to 100"),
        (b"{", "line 1"),
        (b"", "there are no labels"),
    ):
        with pytest.raises(TraceError, match=words):
            with_labels(window, [line], "people.jsonl")
