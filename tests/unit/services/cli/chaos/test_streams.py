"""The client's side of a disturbed stream."""

from itertools import count

from services.cli.chaos.streams import Stream, completion_requests
from services.cli.replay.pool import parse_endpoint


def stream() -> Stream:
    ticks = count()
    return Stream(lambda: next(ticks) * 0.1)


def event(text: str, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"text":"%s","finish_reason":%s}]}\n\n' % (text.encode(), finish.encode())


USAGE = b'data: {"choices":[],"usage":{"completion_tokens":3}}\n\n'


def test_a_stream_that_ends_well() -> None:
    sink = stream()
    sink.response.on_head(200, {"x-penstock-instance": "worker-0"})
    whole = event("a") + event("b") + event("c", '"length"') + USAGE + b"data: [DONE]\n\n"
    for start in range(0, len(whole), 7):
        sink.response.on_body(whole[start : start + 7])
    answer = sink.answer()
    assert (answer.text, answer.tokens, answer.finished) == ("abc", 3, True)
    assert sink.instance_id == "worker-0"


def test_the_longest_gap_is_between_two_pieces_of_text() -> None:
    times_s = iter((1.0, 1.1, 1.4, 1.5, 9.0))
    sink = Stream(lambda: next(times_s))
    sink.response.on_head(200, {})
    for chunk in (event("a"), event("b"), event("c"), event("d", '"length"'), USAGE + b"data: [DONE]\n\n"):
        sink.response.on_body(chunk)
    assert round(sink.answer().longest_gap_ms) == 300
    assert sink.answer().chunks == 4


def test_a_stream_that_breaks_off_is_not_finished() -> None:
    sink = stream()
    sink.response.on_head(200, {})
    sink.response.on_body(event("a") + b'data: {"error":{"message":"worker lost"}}\n\n')
    assert not sink.answer().finished
    assert sink.error == "worker lost"


def test_requests_follow_from_the_seed_and_differ() -> None:
    endpoint = parse_endpoint("http://127.0.0.1:1")
    first = completion_requests(endpoint, "m", range(3, 500), streams=8, tokens=9, seed=1)
    assert first == completion_requests(endpoint, "m", range(3, 500), streams=8, tokens=9, seed=1)
    assert len(set(first)) == 8
