"""A client of the mesh: sends a request to a frontend and reads the answer, as an OpenAI client would."""

import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fault_simulation.http import HttpAnswer, http_request
from fault_simulation.network import Network
from fault_simulation.node import Node


@dataclass(slots=True)
class ReceivedChoice:
    """What came of one choice."""

    text: str = ""
    finish: str = ""
    tokens: list[str] = field(default_factory=list)
    """Where logprobs were asked for: the text of each token."""


@dataclass(slots=True)
class ReceivedAnswer:
    """What came of one request."""

    status: int = 0
    request_id: str = ""
    choices: dict[int, ReceivedChoice] = field(default_factory=lambda: defaultdict(ReceivedChoice))
    completion_tokens: int | None = None
    error: str = ""
    """What the frontend said, or how the connection broke; empty for an answer that is whole."""
    is_broken: bool = False
    """The connection ended before the answer did."""
    tier: str = ""
    """Of a cascade: whose answer it is."""
    because: str = ""
    """Of a cascade: why that tier's."""
    longest_gap_s: float = 0.0
    """The longest time without news after the status."""
    last_event_id: str = ""
    """Of a stream: behind which it goes on."""


async def no_pause() -> None:
    """Read on at once."""


async def ask(
    network: Network,
    node: Node,
    address: str,
    path: str,
    body: Mapping[str, Any] | None,
    headers: Mapping[str, str],
    answer: ReceivedAnswer | None = None,
    pause: Callable[[], Awaitable[None]] = no_pause,
) -> ReceivedAnswer:
    """Send a request (GET where there is no `body`) and read all of its answer, into `answer` if given: what has come
    is there even if this is cancelled, by which the client leaves. `pause` is awaited before each read."""
    answer = answer or ReceivedAnswer()
    sent = b"" if body is None else json.dumps(body).encode()
    method, kind = ("GET", {}) if body is None else ("POST", {"content-type": "application/json"})
    exchange = http_request(network, node, address, method, path, {**kind, **headers}, sent)
    try:
        answer.status = await exchange.started()
        answer.request_id = exchange.headers.get("x-request-id", "")
        if exchange.headers.get("content-type", "").startswith("text/event-stream"):
            await _read_stream(network, exchange, answer, pause)
        else:
            await pause()
            _read_whole(json.loads(await exchange.body()), answer)
    except ConnectionError as error:
        answer.is_broken = True
        answer.error = f"{error}"
    finally:
        exchange.leave()
    return answer


async def _read_stream(
    network: Network, exchange: HttpAnswer, answer: ReceivedAnswer, pause: Callable[[], Awaitable[None]]
) -> None:
    buffered, heard_s, done = b"", network.loop.now_s, False
    while True:
        await pause()
        chunk = await exchange.chunk()
        if chunk is None:
            break
        answer.longest_gap_s = max(answer.longest_gap_s, network.loop.now_s - heard_s)
        heard_s = network.loop.now_s
        *events, buffered = (buffered + chunk).split(b"\n\n")
        for line in [line for event in events for line in event.split(b"\n")]:
            if line.startswith(b"id: "):
                answer.last_event_id = line[4:].decode()
            elif line == b"data: [DONE]":
                done = True
            elif line.startswith(b"data: "):
                _read_event(json.loads(line[6:]), answer)
    if not done and not answer.error:
        answer.error = "the stream ended without [DONE]"


def _read_event(event: dict[str, Any], answer: ReceivedAnswer) -> None:
    if "error" in event:
        answer.error = str(event["error"])
        return
    for choice in event["choices"]:
        received = answer.choices[choice["index"]]
        received.tokens += _tokens_of(choice)
        received.text += (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
        if choice.get("finish_reason"):
            received.finish = choice["finish_reason"]
    _read_cascade(event, answer)
    if event.get("usage"):
        answer.completion_tokens = event["usage"]["completion_tokens"]


def _read_whole(content: dict[str, Any], answer: ReceivedAnswer) -> None:
    if "error" in content:
        answer.error = str(content["error"])
        return
    for choice in content["choices"]:
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        answer.choices[choice["index"]] = ReceivedChoice(text or "", choice["finish_reason"], _tokens_of(choice))
    answer.completion_tokens = content["usage"]["completion_tokens"]
    _read_cascade(content, answer)


def _read_cascade(content: dict[str, Any], answer: ReceivedAnswer) -> None:
    if facts := content.get("penstock"):
        answer.tier, answer.because = facts["tier"], facts["because"]


def _tokens_of(choice: dict[str, Any]) -> list[str]:
    logprobs = choice.get("logprobs")
    if not logprobs:
        return []
    if "tokens" in logprobs:  # of a completion
        return list(logprobs["tokens"])
    return [position["token"] for position in logprobs["content"] or ()]
