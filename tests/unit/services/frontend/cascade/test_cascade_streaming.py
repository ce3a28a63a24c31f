"""Streams from a cascade: an answer that is sure to be accepted goes out while it is being written."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.v1 import request_pb2, scheduler_pb2
from services.frontend.cascade import keep_alives
from tests.unit.services.frontend.cascade_of_fakes import RECORD, USER, Cascade, cascade, saying
from tests.unit.services.frontend.fakes import Delta, Script, failure, tokens

pytestmark = pytest.mark.live

TAKES_ALL = msgspec.structs.replace(RECORD, thresholds=(0.0,))
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "One, two, three and four. Then some more."
REFUSED = failure(request_pb2.ERROR_CODE_REFUSED, "no room")


def body(path: str = CHAT, **options: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"messages": USER} if path == CHAT else {"prompt": "Say", "max_tokens": 100}
    return {"model": "both", **prompt, **options}


def streamed(path: str = CHAT, **options: Any) -> dict[str, Any]:
    return body(path, stream=True, stream_options={"include_usage": True}, **options)


@asynccontextmanager
async def streaming(
    both: Cascade, path: str = CHAT, **options: Any
) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[Any]]]:
    """The response, and its events as they come: comments and [DONE] as text."""
    async with both.mesh.http() as http, http.stream("POST", path, json=streamed(path, **options)) as response:
        yield response, events_of(response)


async def events_of(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            text = line.removeprefix("data: ")
            yield json.loads(text) if text.startswith("{") else text


async def all_events(both: Cascade, path: str = CHAT, **options: Any) -> list[Any]:
    async with streaming(both, path, **options) as (_, events):
        return [event async for event in events]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


def breaks_off_after(script: Script, steps: int) -> Script:
    return lambda request: [*list(script(request))[:steps], REFUSED]


def endless(_: request_pb2.GenerateRequest) -> list[Delta]:
    return [Delta(offset=index, token_ids=[70 + index % 20]) for index in range(100_000)]


def endless_and_fast(_: request_pb2.GenerateRequest) -> list[Delta]:
    """Enough to fill the buffers of a socket within few steps."""
    return [Delta(offset=index, token_ids=[*range(70, 90)] * 5) for index in range(0, 1_000_000, 100)]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_that_is_sure_to_be_accepted_is_sent_as_it_is_written(model_path: Path, path: str) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL) as both:
        both.mesh.worker.script = saying(both.mesh, LONG)
        both.mesh.worker.step_s = 0.02
        async with streaming(both, path) as (response, events):
            first = await anext(events)
            assert both.mesh.service.running, "the tier is still writing"
            rest = [event async for event in events]
        assert response.headers["x-penstock-tier"] == "small"
        assert response.headers["x-penstock-accepted-because"] == "accepts_all"
        assert response.headers["x-penstock-instance"] == "worker-small"
        assert "x-penstock-seconds" not in response.headers, "nobody knows yet"
        begun = {"tier": "small", "because": "accepts_all", "compromise": False, "seconds": None, "tiers": []}
        assert first["penstock"] == begun
        *between, last, usage, done = rest
        assert len(between) > 5
        assert not any("penstock" in event for event in between)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert usage["choices"] == []
        assert done == "[DONE]"
        assert last["penstock"] == usage["penstock"]
        (tier,) = last["penstock"]["tiers"]
        assert (tier["model"], tier["score"]) == ("small", None)
        assert last["penstock"]["seconds"] >= tier["seconds"] > 0
        assert tier["completion_tokens"] == usage["usage"]["completion_tokens"]
        assert len({(event["id"], event["created"], event["model"]) for event in (first, *between, last, usage)}) == 1
        assert response.headers["x-request-id"] == first["id"]
        assert text_of([first, *rest]) == LONG


@pytest.mark.slow
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [{}, {"stop": ["and four"]}, {"stop": "three", "logprobs": True}, {"echo": True}])
async def test_the_text_and_usage_are_those_of_the_answer_that_is_not_streamed(
    model_path: Path, path: str, options: dict[str, Any]
) -> None:
    if path == CHAT and "echo" in options:
        options = {"max_tokens": 7}
    if path == COMPLETIONS and "logprobs" in options:
        options = {**options, "logprobs": 0}
    record = msgspec.structs.replace(TAKES_ALL, judges=("confidence",))
    async with cascade(model_path, lambda _: None, record) as both:
        both.mesh.worker.script = saying(both.mesh, LONG)
        async with both.mesh.http() as http:
            whole = (await http.post(path, json=body(path, **options))).json()
        events = await all_events(both, path, **options)
    (choice,) = whole["choices"]
    assert text_of(events) == (choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    assert events[-3]["choices"][0]["finish_reason"] == choice["finish_reason"]
    stopped_by = options["stop"][0] if isinstance(options.get("stop"), list) else options.get("stop")
    assert events[-3]["choices"][0]["stop_reason"] == choice["stop_reason"] == stopped_by
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert events[-2]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    logprobs = [event["choices"][0]["logprobs"] for event in events[:-2]]
    assert any(logprobs) == ("logprobs" in options), "for those alone who asked"
    part = "content" if path == CHAT else "token_logprobs"
    spelled = [position for each in logprobs if each for position in each[part]]
    assert spelled == (choice["logprobs"][part] if choice["logprobs"] else [])


@pytest.mark.slow
async def test_after_an_escalation_the_last_tier_streams_and_usage_counts_every_tier(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cascade(model_path, lambda _: 10.0, large_step_s=0.03) as both:
        mesh = both.mesh
        quick = await all_events(both)
        monkeypatch.setattr(keep_alives, "KEEP_ALIVE_S", 0.02)
        mesh.worker.step_s = 0.05
        async with streaming(both) as (response, events):
            slow = [event async for event in events]
        assert response.headers.get("x-penstock-tier") is None, "a keep-alive took the headers along"
        assert slow[0] == ": small is answering"
        comments = [event for event in slow if isinstance(event, str) and event.startswith(":")]
        assert slow[: len(comments)] == comments, "none within the answer, however slow"
        for events_got in (quick, slow[len(comments) :]):
            assert text_of(events_got) == "Something."
            first, last, usage = events_got[0]["penstock"], events_got[-3]["penstock"], events_got[-2]["usage"]
            assert (first["tier"], first["because"], first["seconds"]) == ("large", "last_tier", None)
            assert [(tier["model"], tier["score"]) for tier in first["tiers"]] == [("small", 10.0)]
            assert [tier["model"] for tier in last["tiers"]] == ["small", "large"]
            assert usage["completion_tokens"] == sum(tier["completion_tokens"] for tier in last["tiers"])
        assert mesh.metric("cascade_answers_total", cascade="both", tier="large", because="last_tier") == 2
        assert mesh.metric("ttft_seconds_count", model="both") == 2
        assert mesh.metric("ttft_seconds_sum", model="both") < mesh.metric("e2e_seconds_sum", model="both")
        assert mesh.metric("inter_token_seconds_count", model="both") > 0


async def test_who_does_not_stream_waits_for_the_whole_answer(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL) as both:
        answer = (await both.ask()).parse()
        assert answer.choices[0].message.content == "Hm."
        assert answer.penstock["seconds"] > 0


@pytest.mark.slow
async def test_an_answer_that_may_be_cut_for_another_is_not_shown_before_it_is_there(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0) as both:
        events = await all_events(both, penstock={"latency_s": 60})
        assert [event["choices"][0]["delta"].get("content") for event in events[:-2]] == ["", "Something."]
        both.mesh.workers[1].step_s = 5.0
        events = await all_events(both, penstock={"latency_s": 2})
        assert text_of(events) == "Hm."
        assert events[0]["penstock"]["because"] == "deadline"


@pytest.mark.slow
async def test_a_tier_that_fails_before_its_first_token_is_passed_over(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, TAKES_ALL) as both:
        both.mesh.worker.script = lambda _: [REFUSED]
        events = await all_events(both)
        assert text_of(events) == "Something."
        assert "no room" in events[0]["penstock"]["tiers"][0]["failure"]
        # As long as all that was written may belong to a stop string, the client has got nothing.
        both.mesh.worker.script = breaks_off_after(saying(both.mesh, LONG), 1)
        assert text_of(await all_events(both, stop=LONG)) == "Something."
        assert both.mesh.metric("cascade_broken_off_total", cascade="both", tier="small") == 0
    async with cascade(model_path, lambda _: 10.0) as both:
        both.mesh.workers[1].script = lambda _: [REFUSED]
        events = await all_events(both)
        assert text_of(events) == "Hm."
        assert events[-3]["penstock"]["because"] == "tier_failed"


@pytest.mark.slow
async def test_a_tier_that_fails_after_its_first_token_ends_the_stream_with_its_error(model_path: Path) -> None:
    async with cascade(model_path, lambda _: 10.0, TAKES_ALL) as both:
        both.mesh.worker.script = breaks_off_after(saying(both.mesh, LONG), 6)
        events = await all_events(both)
        assert LONG.startswith(text_of(events))
        assert text_of(events)
        plain = await all_events(both, model="small")
        assert events[-1] == plain[-1], "no [DONE], and no other tier's answer"
        assert "no room" in events[-1]["error"]["message"]
        assert both.mesh.workers[1].received == []
        assert both.mesh.metric("cascade_broken_off_total", cascade="both", tier="small") == 1
        assert both.mesh.metric("cascade_answers_total", cascade="both", tier="small", because="accepts_all") == 0
        assert both.router.judged == []


async def test_what_was_given_up_and_is_asked_again_streams(model_path: Path) -> None:
    record = msgspec.structs.replace(RECORD, judges=("confidence",))
    async with cascade(model_path, lambda _: 10.0, record) as both:
        both.mesh.worker.script = saying(both.mesh, "Hm. " * 20)
        both.mesh.workers[1].script = lambda _: [REFUSED]
        events = await all_events(both)
        assert text_of(events) == "Hm. " * 20
        assert len(events) > 20
        first, last = events[0]["penstock"], events[-3]["penstock"]
        assert (first["tier"], first["because"], first["tiers"][0]["given_up"]) == ("small", "tier_failed", True)
        assert [(tier["model"], tier["given_up"]) for tier in last["tiers"]] == [
            ("small", True),
            ("large", False),
            ("small", False),
        ]
        whole_tokens = last["tiers"][2]["completion_tokens"]
        assert events[-2]["usage"]["completion_tokens"] > whole_tokens, "the answer that was given up counts too"


@pytest.mark.slow
async def test_a_client_that_leaves_takes_the_tier_along(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL) as both:
        both.mesh.worker.script, both.mesh.worker.step_s = endless, 0.01
        async with streaming(both) as (_, events):
            await anext(events)
        await both.mesh.worker.wait_until(lambda: len(both.mesh.worker.aborted) == 1)
        await both.mesh.until(lambda: not both.mesh.service.running)
        assert both.mesh.metric("disconnects_total") == 1
        assert both.mesh.service.gate.queue.running == 0


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_aborted_and_cut(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL, max_pending_tokens=500) as both:
        both.mesh.worker.script = endless_and_fast
        host, port = both.mesh.url.removeprefix("http://").split(":")
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(client, (host, int(port)))
            sent = json.dumps(streamed()).encode()
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n\r\n".encode()
            await loop.sock_sendall(client, head + sent)
            await both.mesh.worker.wait_until(lambda: len(both.mesh.worker.aborted) == 1)
            await both.mesh.until(lambda: not both.mesh.service.running)
            assert both.mesh.metric("slow_clients_total") == 1
        finally:
            client.close()


@pytest.mark.slow
async def test_a_stream_ends_at_its_deadline(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL, request_deadline_s=2.0) as both:
        both.mesh.worker.script, both.mesh.worker.step_s = endless, 0.01
        events = await all_events(both)
        assert events[-1]["error"]["code"] == "deadline_exceeded"
        await both.mesh.worker.wait_until(lambda: len(both.mesh.worker.aborted) == 1)


@pytest.mark.slow
async def test_a_stream_survives_the_death_of_its_instance(model_path: Path) -> None:
    async with cascade(model_path, lambda _: None, TAKES_ALL) as both:
        mesh = both.mesh
        ids = mesh.ids(LONG * 5)

        def goes_on(request: request_pb2.GenerateRequest) -> list[Delta]:
            emitted = list(request.emitted_token_ids)
            assert emitted == ids[: len(emitted)]
            deltas = tokens(*([token_id] for token_id in [*ids[len(emitted) :], 1]))
            for delta in deltas:
                delta.offset += len(emitted)
            return deltas

        def place(request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse:
            chosen = "worker-other" if "worker-small" in request.excluded_instance_ids else "worker-small"
            placed = scheduler_pb2.PLACE_OUTCOME_PLACED
            return scheduler_pb2.PlaceResponse(outcome=placed, instance_id=chosen, policy="fake")

        mesh.scheduler.choose = place
        mesh.worker.script, mesh.worker.step_s = lambda request: goes_on(request)[:10], 0.005
        other = await mesh.add_worker(goes_on, instance_id="worker-other", model="small")
        async with streaming(both) as (_, events):
            got = [await anext(events)]
            await mesh.until(lambda: mesh.worker.steps >= 10)
            await mesh.worker.stop()
            got += [event async for event in events]
        assert got[-1] == "[DONE]"
        assert text_of(got) == LONG * 5
        assert got[-2]["usage"]["completion_tokens"] == len(ids) + 1
        assert 0 < len(other.received[0].emitted_token_ids) <= 10
        assert mesh.metric("recoveries_total", reason="worker_lost") == 1
        assert mesh.metric("cascade_broken_off_total", cascade="both", tier="small") == 0
