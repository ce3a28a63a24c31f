"""The client's side of a disturbed stream."""

import asyncio
from itertools import count

import msgspec
import pytest

from services.cli.chaos import streams
from services.cli.chaos.streams import Client, Stream, completion_requests
from services.cli.replay.pool import parse_endpoint
from tests.mesh.running_mesh import free_port
from tests.unit.services.cli.fake_endpoint import Answer, FakeEndpoint, serving


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
    assert (answer.instance_id, answer.error) == ("worker-0", "")


def test_the_longest_gap_is_between_two_pieces_of_text() -> None:
    times_s = iter((0.2, 1.0, 1.1, 1.4, 1.5, 9.0))
    sink = Stream(lambda: next(times_s))
    sink.response.on_head(200, {})
    for chunk in (event("a"), event("b"), event("c"), event("d", '"length"'), USAGE + b"data: [DONE]\n\n"):
        sink.response.on_body(chunk)
    assert round(sink.answer().longest_gap_ms) == 300
    assert sink.answer().chunks == 4
    assert round(sink.answer().wait_ms) == 800


def test_a_stream_that_breaks_off_is_not_finished() -> None:
    sink = stream()
    sink.response.on_head(200, {})
    sink.response.on_body(event("a") + b'data: {"error":{"message":"worker lost"}}\n\n')
    assert not sink.answer().finished
    assert sink.answer().error == "worker lost"


def test_requests_follow_from_the_seed_and_differ() -> None:
    endpoint = parse_endpoint("http://127.0.0.1:1")
    first = completion_requests(endpoint, "m", range(3, 500), streams=8, tokens=9, seed=1)
    assert first == completion_requests(endpoint, "m", range(3, 500), streams=8, tokens=9, seed=1)
    assert len({request.encoded() for request in first}) == 8


def test_prompts_share_prefixes_and_a_salt_changes_nothing_else() -> None:
    endpoint = parse_endpoint("http://127.0.0.1:1")
    requests = completion_requests(endpoint, "m", range(3, 500), streams=8, tokens=9, seed=1, shared_prefix=300)
    prompts = [request.fields["prompt"] for request in requests]
    assert len({tuple(prompt[:300]) for prompt in prompts}) == streams.PREFIXES
    assert len(set(map(tuple, prompts))) == 8
    bodies = [msgspec.json.decode(requests[0].encoded(salt).split(b"\r\n\r\n", 1)[1]) for salt in ("", "a", "b")]
    assert [body.pop("cache_salt", "") for body in bodies] == ["", "a", "b"]
    assert bodies[0] == bodies[1] == bodies[2]


def asked(*urls: str) -> Stream:
    """What becomes of one request to whoever of these takes it."""

    async def ask() -> Stream:
        client = Client([parse_endpoint(url) for url in urls])
        stream = Stream(asyncio.get_running_loop().time)
        endpoint = client.pools[0].endpoint
        (request,) = completion_requests(endpoint, "demo", range(3, 500), streams=1, tokens=8, seed=1)
        await client.ask(request.encoded(), stream, deadline_s=20.0)
        client.close()
        return stream

    return asyncio.run(ask())


@pytest.mark.live
def test_a_request_that_no_frontend_took_goes_to_another() -> None:
    with serving(FakeEndpoint()) as endpoint:
        closed = f"http://127.0.0.1:{free_port()}"
        answers = asked(closed, endpoint.url).answer(), asked(endpoint.url, closed).answer()
    assert [(answer.tokens, answer.error) for answer in answers] == [(8, "")] * 2
    assert len(endpoint.bodies) == 2, "and to one only"


@pytest.mark.live
def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    with serving(FakeEndpoint(answer=lambda body, index: Answer(cut_after_tokens=2))) as endpoint:
        assert not asked(endpoint.url).answer().finished
    assert len(endpoint.bodies) == 1


def resumable(body: bytes) -> Stream:
    sink = stream()
    sink.response.on_head(200, {"x-request-id": "cmpl-1", "x-penstock-instance": "worker-0"})
    for start in range(0, len(body), 5):
        sink.response.on_body(body[start : start + 5])
    return sink


def test_an_answer_is_resumed_behind_the_last_event_that_was_read() -> None:
    # The second event's id has come, its data only in part; of the third nothing but the id of the first is known.
    sink = resumable(b"id: 3\n" + event("a") + b"id: 5\n" + event("b")[:20])
    assert (sink.response.last_event_id, sink.response.is_resumable) == ("3", True)
    sink.response.on_head(200, {"x-request-id": "cmpl-1"})
    sink.response.on_body(b"id: 5\n" + event("b", '"length"') + b"id: 5.u\n" + USAGE + b"data: [DONE]\n\n")
    answer = sink.answer()
    assert (answer.text, answer.finished, answer.instance_id) == ("ab", True, "worker-0")
    assert not sink.response.is_resumable, "it has ended"


def test_an_answer_without_event_ids_or_with_an_error_is_not_resumed() -> None:
    assert not resumable(event("a")).response.is_resumable
    assert not resumable(b"id: 3\n" + event("a") + b'data: {"error":{"message":"no"}}\n\n').response.is_resumable
    refused = stream()
    refused.response.on_head(503, {"x-request-id": "cmpl-1"})
    assert not refused.response.is_resumable


@pytest.mark.live
def test_a_frontend_that_never_comes_back_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "CONNECT_S", 0.2)
    answer = asked(f"http://127.0.0.1:{free_port()}").answer()
    assert not answer.finished
    assert "cannot connect" in answer.error
