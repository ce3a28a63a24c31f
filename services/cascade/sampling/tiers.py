"""Asks tiers for the answers that a sample lacks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from mesh.errors import NoInstance, PeerUnavailable
from services.cascade.judges.interface import JudgedAnswer

LOWEST_PRIORITY = 2**31 - 1
"""Samples wait behind every client's request."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A tier's whole answer to a client, scored by the first judge."""

    model: str
    output_tokens: int
    score: float
    text: str = ""
    token_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """A request that came from a client."""

    request: Mapping[str, Any]
    """The JSON body as the client sent it."""
    chat: bool
    prompt: str
    input_tokens: int
    known: KnownAnswer | None = None
    """The tier that need not be asked."""
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A tier's answer to a sampled request, with its lengths and token probabilities."""

    judged: JudgedAnswer
    input_tokens: int
    output_tokens: int


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] = []
    token_logprobs: list[float] = []


class _Message(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Refusal(msgspec.Struct):
    code: str | None = None


class _Refused(msgspec.Struct):
    error: _Refusal


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class TierClient:
    """Reaches the tiers through the mesh's own frontends."""

    def __init__(
        self,
        find_frontend: Callable[[], str],
        deadline_s: float,
        api_key: str = "",
        http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`http`: what carries the requests; None: TCP."""
        self._find_frontend = find_frontend
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(timeout=deadline_s, headers=headers, transport=http)

    async def answer(self, sampled: SampledRequest, model: str) -> SampledAnswer:
        """Raises `NoInstance` where the tier has nobody to give one, and `PeerUnavailable` where it gives none."""
        url = self._find_frontend()
        if not url:
            raise PeerUnavailable("no frontend is there to reach the tiers through")
        path = "chat/completions" if sampled.chat else "completions"
        try:
            response = await self._client.post(f"{url}/{path}", json=_body(sampled, model))
        except httpx.HTTPError as error:
            raise PeerUnavailable(f"{url}: {str(error) or type(error).__name__}") from error
        if response.status_code != httpx.codes.OK:
            if _is_nobody_there(response):
                raise NoInstance(f"{model} has no instance")
            raise PeerUnavailable(f"{url} answers {response.status_code} for {model}: {response.text[:200]}")
        try:
            answer = msgspec.json.decode(response.content, type=_Answer)
            choice = answer.choices[0]
        except (msgspec.MsgspecError, IndexError) as error:
            raise PeerUnavailable(f"{url} gives no answer that can be read for {model}") from error
        text = choice.message.content if choice.message is not None else choice.text or ""
        judged = JudgedAnswer(sampled.prompt, text, model, _token_logprobs(choice.logprobs))
        return SampledAnswer(judged, answer.usage.prompt_tokens, max(1, answer.usage.completion_tokens))

    async def close(self) -> None:
        await self._client.aclose()


def _is_nobody_there(response: httpx.Response) -> bool:
    """A model that a frontend has never seen an instance of is one that it does not know."""
    try:
        code = msgspec.json.decode(response.content, type=_Refused).error.code
    except msgspec.MsgspecError:
        return False
    return code in ("no_instance", "model_not_found")


def _body(sampled: SampledRequest, model: str) -> dict[str, Any]:
    left_out = {"stream", "stream_options", "penstock", "n", "logprobs", "top_logprobs", "echo"}
    kept = {name: value for name, value in sampled.request.items() if value is not None and name not in left_out}
    logprobs: bool | int = True if sampled.chat else 0
    return {**kept, "model": model, "priority": LOWEST_PRIORITY, "logprobs": logprobs}


def _token_logprobs(logprobs: _Logprobs | None) -> tuple[float, ...]:
    if logprobs is None:
        return ()
    return tuple(logprobs.token_logprobs or (position.logprob for position in logprobs.content))
