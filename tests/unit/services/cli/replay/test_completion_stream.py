import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.replay.completion_stream import MAX_EVENT_BYTES, CompletionStream

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def event(document: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


TOKEN = event({"id": "cmpl-1", "choices": [{"index": 0, "text": "é", "finish_reason": None}], "usage": None})
BODY = b": comment\n\n" + 3 * TOKEN + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


def stream_at(*times_s: float) -> CompletionStream:
    """A stream whose clock reads these times one after another, then stands still."""
    times = itertools.chain(times_s, itertools.repeat(times_s[-1]))
    return CompletionStream(lambda: next(times))


def test_first_and_last_token_are_timed() -> None:
    stream = stream_at(1.1, 1.2, 1.5, 1.6, 1.7, 2.0)
    stream.on_head(200, {"x-penstock-instance": "worker-1", "x-penstock-policy": "lmetric"})
    for chunk in (TOKEN, TOKEN, TOKEN, event({"choices": [], "usage": USAGE}), b"data: [DONE]\r\n\r\n"):
        stream.on_body(chunk)
    outcome = stream.outcome(arrival_s=1.0)
    assert outcome.error == ""
    assert outcome.ttft_ms == pytest.approx(100)
    assert outcome.tpot_ms == pytest.approx(200)
    assert outcome.e2e_ms == pytest.approx(1000)
    assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (40, 3, 16)
    assert (outcome.instance_id, stream.policy) == ("worker-1", "lmetric")


@given(st.lists(st.integers(0, len(BODY)), max_size=20))
def test_where_the_network_cuts_does_not_matter(cuts: list[int]) -> None:
    stream = stream_at(1.0)
    stream.on_head(200, {})
    for start, end in itertools.pairwise([0, *sorted(cuts), len(BODY)]):
        stream.on_body(BODY[start:end])
    outcome = stream.outcome(arrival_s=0.0)
    assert (outcome.error, outcome.output_tokens, outcome.first_token_s) == ("", 3, 1.0)


@given(st.integers(200, 599), st.lists(st.binary(max_size=80), max_size=5))
def test_no_bytes_make_it_fail_otherwise_than_by_an_error(status: int, chunks: list[bytes]) -> None:
    stream = stream_at(1.0)
    stream.on_head(status, {})
    for chunk in chunks:
        stream.on_body(chunk)
    assert stream.outcome(arrival_s=0.0).error


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TOKEN, r"ended without \[DONE\]"),
        (event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n", "without a token"),
        (TOKEN + b"data: [DONE]\n\n", "told no usage"),
        (b"data: {]\n\n", "no completion chunk"),
        (TOKEN + event({"error": {"message": "worker died"}}), "^worker died$"),
        (b"x" * (MAX_EVENT_BYTES + 1), "more than"),
    ],
)
def test_what_is_wrong_is_said(body: bytes, error: str) -> None:
    stream = stream_at(1.0)
    stream.on_head(200, {})
    stream.on_body(body)
    with pytest.raises(AssertionError, match=error):
        raise AssertionError(stream.outcome(arrival_s=0.0).error)


@pytest.mark.parametrize(
    ("body", "message"),
    [(b'{"error": {"message": "full"}}', "full"), (b"<html>", "<html>"), (b"", "no body")],
)
def test_an_http_error_tells_its_message(body: bytes, message: str) -> None:
    stream = stream_at(1.0)
    stream.on_head(503, {})
    stream.on_body(body)
    assert stream.outcome(arrival_s=0.0, failure="closed").error == f"HTTP 503: {message}"
