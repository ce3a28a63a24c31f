"""The requests that are disturbed: greedy completions of different prompts, with fixed numbers of tokens."""

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mesh.errors import PeerUnavailable, RpcError
from services.cli.chaos.schema import misfit
from services.cli.chaos.verdict import Answer
from services.cli.replay.completion_stream import Choice, CompletionStream
from services.cli.replay.completions import request_head
from services.cli.replay.pool import ConnectionPool, Endpoint

PROMPT_TOKENS = (16, 96)
"""Of each prompt, behind the prefix that it may share."""
PREFIXES = 3
"""Different ones that prompts share."""
RETRY_S = 0.1
CONNECT_S = 10.0
"""So long a client tries to find a frontend that takes its request."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A streaming completion request."""

    endpoint: Endpoint
    fields: dict[str, Any]

    def encoded(self, cache_salt: str = "") -> bytes:
        """As bytes of HTTP. The answer is the same under any salt, but its KV is looked for under that."""
        salt = {"cache_salt": cache_salt} if cache_salt else {}
        body = msgspec.json.encode(self.fields | salt)
        head = request_head(self.endpoint, "POST", "/v1/completions", "", len(body)).removesuffix(b"\r\n")
        return head + b"x-penstock-event-ids: true\r\n\r\n" + body


@dataclass(frozen=True, slots=True)
class Question:
    """A request and the undisturbed answer to it."""

    request: CompletionRequest
    expected: Answer
    schema: dict[str, Any] | None = None
    """That the answer has to fit."""


class Stream:
    """What one disturbed stream brings; `response` is the sink of its exchange."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.response = CompletionStream(now_s, self._on_choice)
        self.failure = ""
        """Why the exchange broke off, if it did."""
        self.chunks = 0
        self.resumptions = 0
        """Times that the rest of it was asked for."""
        self._asked_s = now_s()
        self._wait_s = 0.0
        self._text: list[str] = []
        self._last_s: float | None = None
        self._longest_gap_s = 0.0
        self._finish_reason = ""

    def answer(self) -> Answer:
        """The answer as far as it has come."""
        error = self.response.failure(self.failure)
        return Answer(
            "".join(self._text),
            self.response.output_tokens,
            bool(self._finish_reason) and not error,
            1000 * self._longest_gap_s,
            self.chunks,
            1000 * self._wait_s,
            error,
            self.response.instance_id,
            self.resumptions,
        )

    def _on_choice(self, choice: Choice, now_s: float) -> None:
        self._text.append(choice.text)
        self._finish_reason = choice.finish_reason or self._finish_reason
        if self._last_s is None:
            self._wait_s = now_s - self._asked_s
        else:
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.chunks += 1


class Client:
    """A client behind a balancer: whom a frontend does not take goes to the next, and whose stream breaks off asks the
    next for the rest of it, by request id and `Last-Event-ID`.

    Nothing is asked for twice: a request is sent again only where nothing was answered to it.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.pools = [ConnectionPool(endpoint) for endpoint in endpoints]
        self._turn = 0

    async def ask(self, request: bytes, stream: Stream, deadline_s: float) -> None:
        """See a request through; what goes wrong is kept in the stream."""
        self._turn += 1
        try:
            async with asyncio.timeout(deadline_s):
                await self._ask(request, stream, self._turn)
        except TimeoutError:
            stream.failure = f"no end within {deadline_s:g} s"
        except PeerUnavailable as error:
            stream.failure = str(error)

    def close(self) -> None:
        for pool in self.pools:
            pool.close()

    async def _ask(self, request: bytes, stream: Stream, turn: int) -> None:
        clock, response = asyncio.get_running_loop().time, stream.response
        give_up_s = clock() + CONNECT_S
        while True:
            heard = response.last_event_id
            try:
                await self.pools[turn % len(self.pools)].exchange(request, response)
                return
            except PeerUnavailable:
                if response.last_event_id != heard:
                    give_up_s = clock() + CONNECT_S
                if (response.answered and not response.is_resumable) or clock() >= give_up_s:
                    raise
            turn += 1
            await asyncio.sleep(RETRY_S)
            if response.is_resumable:
                request = _rest_of(response, self.pools[turn % len(self.pools)].endpoint)
                stream.resumptions += 1


def _rest_of(response: CompletionStream, endpoint: Endpoint) -> bytes:
    head = request_head(endpoint, "GET", f"/v1/requests/{response.request_id}/events", "", 0)
    return head.removesuffix(b"\r\n") + b"last-event-id: %s\r\n\r\n" % response.last_event_id.encode("latin-1")


def completion_requests(
    endpoint: Endpoint,
    model: str,
    vocabulary: range,
    streams: int,
    tokens: int,
    seed: int,
    schema: dict[str, Any] | None = None,
    shared_prefix: int = 0,
) -> list[CompletionRequest]:
    """One request for each stream, with a random prompt. `tokens`: that each answer has or, with a `schema`, may have.
    `shared_prefix`: tokens that prompts begin with alike, by one of a few prefixes."""
    # Prefixes are drawn: in turn, three of them and three workers in turn brought each prefix to one worker only.
    draw = random.Random(seed)
    prefixes = [draw.choices(vocabulary, k=shared_prefix) for _ in range(PREFIXES)] if shared_prefix else [[]]
    requests = []
    for _ in range(streams):
        prompt = draw.choice(prefixes) + draw.choices(vocabulary, k=draw.randint(*PROMPT_TOKENS))
        fields = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            **({"ignore_eos": True} if schema is None else {"structured_outputs": {"json": schema}}),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        requests.append(CompletionRequest(endpoint, fields))
    return requests


async def answered(
    client: Client, requests: Sequence[CompletionRequest], deadline_s: float, schema: dict[str, Any] | None = None
) -> list[Question]:
    """The requests with their right answers. Raises RpcError if there is none, or one that does not fit the schema,
    even while nothing is broken."""
    clock = asyncio.get_running_loop().time
    streams = [Stream(clock) for _ in requests]
    await asyncio.gather(
        *(client.ask(request.encoded(), stream, deadline_s) for request, stream in zip(requests, streams, strict=True))
    )
    questions = [Question(request, stream.answer(), schema) for request, stream in zip(requests, streams, strict=True)]
    for question in questions:
        if not question.expected.finished:
            why = question.expected.error or "it ended too early"
            raise RpcError(f"a stream failed before anything was broken: {why}")
        if schema is not None and (wrong := misfit(question.expected.text, schema)):
            raise RpcError(f"an answer did not fit its schema before anything was broken: {wrong}")
    return questions
