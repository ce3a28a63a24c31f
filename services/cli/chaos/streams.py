"""The streams that are disturbed: greedy completions of different prompts, with fixed numbers of tokens."""

import asyncio
import random
from collections.abc import Callable, Sequence

import msgspec

from mesh.errors import PeerUnavailable, RpcError
from services.cli.chaos.verdict import Answer
from services.cli.replay.completion_stream import Choice, CompletionStream
from services.cli.replay.completions import request_head
from services.cli.replay.pool import ConnectionPool, Endpoint

PROMPT_TOKENS = (16, 96)


class Stream:
    """What one disturbed stream brings; `response` is the sink of its exchange."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.response = CompletionStream(now_s, self._on_choice)
        self.failure = ""
        """Why the exchange broke off, if it did."""
        self.chunks = 0
        self._text: list[str] = []
        self._last_s: float | None = None
        self._longest_gap_s = 0.0
        self._finish_reason = ""

    @property
    def instance_id(self) -> str:
        """Where it began."""
        return self.response.instance_id

    @property
    def error(self) -> str:
        """Why it is not whole; empty if it is."""
        return self.response.failure(self.failure)

    def answer(self) -> Answer:
        """What has come so far."""
        finished = bool(self._finish_reason) and not self.error
        return Answer(
            "".join(self._text), self.response.output_tokens, finished, 1000 * self._longest_gap_s, self.chunks
        )

    def _on_choice(self, choice: Choice, now_s: float) -> None:
        self._text.append(choice.text)
        self._finish_reason = choice.finish_reason or self._finish_reason
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
            await pool.exchange(request, stream.response)
    except TimeoutError:
        stream.failure = f"no end within {deadline_s:g} s"
    except PeerUnavailable as error:
        stream.failure = str(error)


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
