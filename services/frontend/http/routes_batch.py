"""POST /v1/chat/completions/batch, several conversations at once, and /invocations, any body at one path: what vLLM
adds to OpenAI's endpoints."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from controlplane.model.pooling import GENERATE
from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError, bad_request
from services.frontend.http.body import decode_body, decode_leniently, timely_body
from services.frontend.http.exchange import ModelExchange, in_batch
from services.frontend.http.openapi import body_docs, object_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.http.routes_generate import accept_body
from services.frontend.http.routes_pooling import (
    answer_classes,
    answer_embeddings,
    answer_pooling,
    answer_ranking,
    answer_scores,
)
from services.frontend.requests.schema import BatchChatRequest, ChatCompletionRequest, CompletionRequest
from services.frontend.requests.service import FrontendService
from services.frontend.requests.unsupported import PROMPT_TOKENS, refuse_unsupported

ADAPTER_HEADER: Final = "x-amzn-sagemaker-adapter-identifier"
"""By which SageMaker's clients name a LoRA adapter, in place of the body's `model`."""
_IGNORED: Final = ("stream", "stream_options", "tools", "parallel_tool_calls")
"""Parameters of a chat that a batch does not know, as in vLLM."""


class _Inputs(msgspec.Struct):
    """What a body is about, by the parameters that it has."""

    model: str | None = None
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    query: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET

    def has(self, name: str) -> bool:
        return getattr(self, name) is not msgspec.UNSET


def batch_routes(service: CascadeService) -> APIRouter:
    """The routes of batches and of /invocations."""
    frontend = service.frontend
    router = APIRouter(route_class=RawRoute)

    @router.post(
        "/v1/chat/completions/batch",
        tags=["generation"],
        **body_docs(("BatchChatRequest",), "ChatCompletion", "A choice for each conversation"),
    )
    async def create_batch(request: Request) -> Response:
        """Answer several conversations at once, each by a choice of its own."""
        asked_by = partial(frontend.authenticate, request.headers.get("authorization"))
        await asked_by()
        bodies, ignored = _bodies(await timely_body(frontend, request), frontend.settings.max_choices)
        try:
            exchange = await accept_body(
                service, request, bodies[0], ChatCompletionRequest, "chatcmpl", asked_by, ignored
            )
        except ApiError as error:
            raise in_batch(error, 0) from error
        if type(exchange) is not ModelExchange:
            raise bad_request("A batch of conversations is answered by a model, not by a cascade.", "model")
        exchange.others = [_other(body, index) for index, body in enumerate(bodies[1:], 1)]
        return exchange

    @router.post("/invocations", tags=["generation"], **object_docs("What the body asks for", 400, 401, 404))
    async def invoke(request: Request) -> Response:
        """Answer a body of a chat, a completion, or whatever the model does: SageMaker's one path for all."""
        asked_by = partial(frontend.authenticate, request.headers.get("authorization"))
        key = await asked_by()
        body = await timely_body(frontend, request)
        if adapter := request.headers.get(ADAPTER_HEADER):
            body = msgspec.json.encode({**decode_body(body, dict), "model": adapter})
        inputs = decode_body(body, _Inputs)
        name = inputs.model or frontend.catalogue.only()
        if service.cascades.records.get(name) is None and GENERATE not in (await frontend.model(name, key)).tasks:
            return await _pooled(frontend, request, body, inputs, name)
        if inputs.has("messages"):
            return await accept_body(service, request, body, ChatCompletionRequest, "chatcmpl", asked_by)
        if inputs.has("prompt"):
            return await accept_body(service, request, body, CompletionRequest, "cmpl", asked_by)
        raise bad_request("The body must hold `messages` or `prompt`.")

    return router


async def _pooled(frontend: FrontendService, request: Request, body: bytes, inputs: _Inputs, name: str) -> Response:
    """By the first of a pooling model's endpoints that the body is for, in vLLM's order."""
    if inputs.has("input") or inputs.has("messages"):
        model = frontend.catalogue.get(name)
        task = "" if model is None else model.tasks[0]
        answer = {"embed": answer_embeddings, "classify": answer_classes}.get(task, answer_pooling)
        return await answer(frontend, request, body)
    return await (answer_ranking if inputs.has("query") else answer_scores)(frontend, request, body)


def _bodies(body: bytes, most: int) -> tuple[list[bytes], Sequence[str]]:
    """That of a chat completion for each conversation, and the names of parameters without effect. Raises ApiError
    (400)."""
    batch = decode_body(body, BatchChatRequest)
    fields: dict[str, Any] = decode_body(body, dict)
    if len(batch.messages) > most:
        raise bad_request(f"At most {most} conversations can be asked about at once.", "messages")
    if batch.n not in (None, 1):
        raise bad_request("Each conversation of a batch gets one choice: leave `n` out.", "n")
    transfer = fields.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get(PROMPT_TOKENS) is not None:
        param = f"kv_transfer_params.{PROMPT_TOKENS}"
        raise bad_request("A batch of conversations has no prompt of its own.", param, "unsupported_parameter")
    if batch.use_beam_search:
        raise bad_request("There is no beam search over a batch of conversations.", "use_beam_search")
    if batch.tool_choice not in (None, "none"):
        raise bad_request("A batch of conversations knows no tools.", "tool_choice")
    ignored = [name for name in _IGNORED if fields.pop(name, None) is not None]
    fields.pop("tool_choice", None)
    return [msgspec.json.encode({**fields, "messages": each}) for each in batch.messages], ignored


def _other(body: bytes, index: int) -> ChatCompletionRequest:
    """Another conversation than the first. Raises ApiError (400)."""
    try:
        request, _ = decode_leniently(body, ChatCompletionRequest)
        refuse_unsupported(request)
    except ApiError as error:
        raise in_batch(error, index) from error
    return request
