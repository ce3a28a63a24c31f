"""The requests that a replay makes: which model, which bytes, one completion from start to end."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from mesh.errors import DeadlineExceeded, PeerUnavailable, RpcError, UnknownModel
from services.cli.replay.completion_stream import CompletionStream
from services.cli.replay.pool import ConnectionPool, Endpoint
from simulator.report.outcome import RequestOutcome
from simulator.traces.prompt import TokenRange, prompt_token_ids
from simulator.traces.request import TraceRequest

MAX_MODELS_BYTES = 4 << 20


class ServedModel(msgspec.Struct, frozen=True):
    """What an endpoint says of a model; None where it says nothing."""

    name: str
    max_model_len_tokens: int | None
    vocab_size: int | None


class _PenstockFacts(msgspec.Struct, frozen=True):
    max_model_len: int | None = None
    vocab_size: int | None = None


class _ModelEntry(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None
    """vLLM's own place for it."""
    penstock: _PenstockFacts | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[_ModelEntry]


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Turns a request of a trace into the bytes of an HTTP request.

    Prompts are token ids, so that lengths and shared prefixes are exact; `ignore_eos` with `min_tokens` makes
    the answers' lengths exact as well.
    """

    endpoint: Endpoint
    model: str
    tokens: TokenRange
    seed: int
    api_key: str = ""

    def encode(self, index: int, request: TraceRequest) -> bytes:
        """Head and body for the request at place `index` of the trace."""
        body = msgspec.json.encode(
            {
                "model": self.model,
                "prompt": prompt_token_ids(request, index, self.seed, self.tokens),
                "max_tokens": request.output_tokens,
                "min_tokens": request.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        return request_head(self.endpoint, "POST", "/v1/completions", self.api_key, len(body)) + body


class _WholeBody:
    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def on_body(self, chunk: bytes) -> None:
        self.body += chunk
        if len(self.body) > MAX_MODELS_BYTES:
            raise ValueError(f"a list of models of more than {MAX_MODELS_BYTES} bytes")


def request_head(endpoint: Endpoint, method: str, path: str, api_key: str, body_bytes: int) -> bytes:
    """Request line and headers, up to and with the empty line."""
    lines = [
        f"{method} {endpoint.path}{path} HTTP/1.1",
        f"Host: {endpoint.authority}",
        "Content-Type: application/json",
        f"Content-Length: {body_bytes}",
    ]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def served_model(pool: ConnectionPool, wanted: str | None, api_key: str, deadline_s: float) -> ServedModel:
    """The model called `wanted`, or the first one listed. Raises UnknownModel or RpcError."""
    sink = _WholeBody()
    head = request_head(pool.endpoint, "GET", "/v1/models", api_key, 0)
    try:
        async with asyncio.timeout(deadline_s):
            await pool.exchange(head, sink)
    except TimeoutError:
        raise DeadlineExceeded(f"{pool.endpoint.authority} did not list its models within {deadline_s:g} s") from None
    if sink.status != 200:
        said = " ".join(sink.body[:200].decode("utf-8", "replace").split())
        raise RpcError(f"{pool.endpoint.authority}/v1/models answered HTTP {sink.status}: {said}")
    try:
        models = {entry.id: entry for entry in msgspec.json.decode(sink.body, type=_ModelList).data}
    except msgspec.DecodeError as error:
        raise RpcError(f"{pool.endpoint.authority}/v1/models is no list of models: {error}") from error
    name = wanted or next(iter(models), None)
    if name is None or name not in models:
        raise UnknownModel(f"the endpoint serves {', '.join(models) or 'no model'}, not {wanted or 'any'}")
    entry = models[name]
    facts = entry.penstock or _PenstockFacts()
    return ServedModel(name, facts.max_model_len or entry.max_model_len, facts.vocab_size)


async def complete(
    pool: ConnectionPool, request: bytes, arrival_s: float, now_s: Callable[[], float], deadline_s: float
) -> tuple[RequestOutcome, str]:
    """Send one completion request and see it through: its outcome and the policy that placed it."""
    stream = CompletionStream(now_s)
    failure = ""
    try:
        async with asyncio.timeout(deadline_s):
            await pool.exchange(request, stream)
    except TimeoutError:
        failure = f"no end within {deadline_s:g} s"
    except PeerUnavailable as error:
        failure = str(error)
    return stream.outcome(arrival_s, failure), stream.policy
