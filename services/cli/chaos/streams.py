"""The streams that are disturbed: greedy completions of different prompts, with fixed numbers of tokens."""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from mesh.errors import PeerUnavailable, RpcError
from services.cli.chaos.verdict import Answer
from services.cli.replay.completion_stream import INSTANCE_HEADER
from services.cli.replay.completions import request_head
from services.cli.replay.pool import ConnectionPool, Endpoint

PROMPT_TOKENS = (16, 96)
MAX_EVENT_BYTES = 1 << 20


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int = 0


class _Error(msgspec.Struct, frozen=True):
    message: str = ""


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_EVENTS = msgspec.json.Decoder(_Event)


class Stream:
    """The response sink of one streamed completion."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._status = 0
        self._partial = b""
        self._text: list[str] = []
        self._tokens = 0
        self._last_s: float | None = None
        self._longest_gap_s = 0.0
        self._finish_reason = ""
        self._done = False
        self.chunks = 0
        self.instance_id = ""
        """Where it began."""
        self.error = ""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Status and headers."""
        self._status = status
        self.instance_id = headers.get(INSTANCE_HEADER, "")

    def on_body(self, chunk: bytes) -> None:
        """A piece of the body."""
        lines = (self._partial + chunk).split(b"\n")
        self._partial = lines.pop()
        if len(self._partial) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._on_data(line[5:].strip())

    def answer(self) -> Answer:
        """What has come so far."""
        finished = self._status == 200 and self._done and bool(self._finish_reason) and not self.error
        return Answer("".join(self._text), self._tokens, finished, 1000 * self._longest_gap_s, self.chunks)

    def _on_data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        event = _EVENTS.decode(data)
        if event.error is not None:
            self.error = event.error.message or "an error without a message"
        if event.usage is not None:
            self._tokens = event.usage.completion_tokens
        for choice in event.choices:
            self._text.append(choice.text)
            self._finish_reason = choice.finish_reason or self._finish_reason
            self._measure()

    def _measure(self) -> None:
        now_s = self._now_s()
        if self._last_s is not None:
            self._longest_gap_s = max(self._longest_gap_s, now_s - self._last_s)
        self._last_s = now_s
        self.chunks += 1


def completion_requests(
    endpoint: Endpoint, model: str, vocabulary: range, streams: int, tokens: int, seed: int
) -> list[bytes]:
    """One HTTP request for each stream."""
    draw = random.Random(seed)
    requests = []
    for _ in range(streams):
        prompt = draw.choices(vocabulary, k=draw.randint(*PROMPT_TOKENS))
        fields = {
            "model": model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = msgspec.json.encode(fields)
        requests.append(request_head(endpoint, "POST", "/v1/completions", "", len(body)) + body)
    return requests


async def run_stream(pool: ConnectionPool, request: bytes, stream: Stream, deadline_s: float) -> None:
    """See one through; what goes wrong is kept in the stream."""
    try:
        async with asyncio.timeout(deadline_s):
            await pool.exchange(request, stream)
    except TimeoutError:
        stream.error = f"no end within {deadline_s:g} s"
    except PeerUnavailable as error:
        stream.error = str(error)


async def undisturbed(pool: ConnectionPool, requests: Sequence[bytes], deadline_s: float) -> list[Answer]:
    """The right answers. Raises RpcError if there is none even now."""
    clock = asyncio.get_running_loop().time
    streams = [Stream(clock) for _ in requests]
    await asyncio.gather(
        *(run_stream(pool, request, stream, deadline_s) for request, stream in zip(requests, streams, strict=True))
    )
    answers = [stream.answer() for stream in streams]
    for stream, answer in zip(streams, answers, strict=True):
        if not answer.finished:
            raise RpcError(f"a stream failed before anything was broken: {stream.error or 'it ended too early'}")
    return answers
