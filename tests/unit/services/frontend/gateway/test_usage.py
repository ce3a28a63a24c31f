"""Usage in answers that come in any pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.gateway.usage import MAX_TAIL_BYTES, Usage, UsageReader

USAGE = {"prompt_tokens": 40, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 32}}


def usage_of(body: bytes, size: int = 7) -> Usage | None:
    reader = UsageReader()
    for start in range(0, len(body), size):
        reader.feed(body[start : start + size])
    return reader.usage()


@given(st.text(max_size=30), st.integers(20, 400))
def test_the_usage_of_a_body_is_found_whatever_the_text_says(text: str, size: int) -> None:
    body = json.dumps({"choices": [{"text": text + '"usage":{"prompt_tokens":1}'}], "usage": USAGE})
    assert usage_of(body.encode(), size) == Usage(40, 32, 5)
    compact = json.dumps({"usage": USAGE, "choices": [{"text": text}]}, separators=(",", ":"))
    assert usage_of(compact.encode(), size) == Usage(40, 32, 5)


def test_the_last_event_of_a_stream_counts() -> None:
    events = [{"usage": None}, {"usage": {"prompt_tokens": 1}}, {"choices": [], "usage": USAGE}]
    body = "".join(f"data: {json.dumps(each)}\n\n" for each in events) + "data: [DONE]\n\n"
    assert usage_of(body.encode()) == Usage(40, 32, 5)


def test_a_stream_that_was_not_asked_for_it_has_none() -> None:
    assert usage_of(b'data: {"choices": [], "usage": null}\n\ndata: [DONE]\n\n') is None
    assert usage_of(b"") is None
    assert usage_of(b'"usage":{"prompt_tokens":') is None


def test_values_that_are_none_count_nothing() -> None:
    assert usage_of(b'{"usage":{"prompt_tokens":"x","completion_tokens":-3,"prompt_tokens_details":null}}') == Usage()


@given(st.integers(0, 3 * MAX_TAIL_BYTES))
def test_no_more_than_the_end_is_kept(length: int) -> None:
    reader = UsageReader()
    reader.feed(b"x" * length)
    assert len(reader._tail) <= MAX_TAIL_BYTES
