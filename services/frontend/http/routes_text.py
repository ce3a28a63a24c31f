"""POST /tokenize and /detokenize: a model's tokenizer, asked alone."""

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.answers.sse import encode
from services.frontend.http.body import decode_body, decode_leniently, timely_body
from services.frontend.http.exchange import without_effect_header
from services.frontend.http.openapi import body_docs
from services.frontend.http.raw_route import RawRoute
from services.frontend.requests.api_keys import ApiKey, tenant_of
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.requests.service import FrontendService
from services.frontend.requests.text_schema import (
    Detokenized,
    DetokenizeRequest,
    TokenizeChatRequest,
    Tokenized,
    TokenizeTextRequest,
)
from services.frontend.requests.unsupported import refuse_unsupported


class _Probe(msgspec.Struct):
    """Which kind of body it is."""

    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def text_routes(frontend: FrontendService) -> APIRouter:
    """The endpoints that need a tokenizer and no instance."""
    router = APIRouter(tags=["text"], route_class=RawRoute)

    @router.post(
        "/tokenize", **body_docs(("TokenizeTextRequest", "ChatCompletionRequest"), "Tokenized", "The token ids")
    )
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation as the model's chat template writes it."""
        key = await frontend.authenticate(request.headers.get("authorization"))
        body = await timely_body(frontend, request)
        if decode_body(body, _Probe).messages is not msgspec.UNSET:
            asked, (model, token_ids, unknown) = (
                decode_body(body, TokenizeChatRequest),
                await _chat(frontend, body, key),
            )
            if asked.add_special_tokens:
                token_ids = model.text.with_added_tokens(token_ids)
            wants_text = asked.return_token_strs
        else:
            text, unknown = decode_leniently(body, TokenizeTextRequest)
            model = await frontend.model(text.model, key)
            token_ids = await model.text.chunked.encode_in(frontend.threads, text.prompt)
            if text.add_special_tokens:
                token_ids = model.text.with_added_tokens(token_ids)
            wants_text = text.return_token_strs
        texts = [model.text.token_name(token_id) for token_id in token_ids] if wants_text else None
        return _json(Tokenized(len(token_ids), model.max_model_len_tokens, token_ids, texts), unknown)

    @router.post("/detokenize", **body_docs(("DetokenizeRequest",), "Detokenized", "The text"))
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special tokens included; ids beyond the vocabulary are none of it."""
        key = await frontend.authenticate(request.headers.get("authorization"))
        asked, unknown = decode_leniently(await timely_body(frontend, request), DetokenizeRequest)
        model = await frontend.model(asked.model, key)
        return _json(Detokenized(model.text.decode(asked.tokens, skip_special_tokens=False)), unknown)

    return router


async def _chat(frontend: FrontendService, body: bytes, key: ApiKey | None) -> tuple[ServedModel, list[int], list[str]]:
    """The prompt of a chat completion with this body, and the names of its unknown parameters."""
    fields = msgspec.json.decode(body)
    for name in ("add_special_tokens", "return_token_strs"):
        fields.pop(name, None)
    if fields.get("tools") == []:
        del fields["tools"]  # which is not refused here, unlike in a chat, as by vLLM
    request, unknown = decode_leniently(msgspec.json.encode(fields), ChatCompletionRequest)
    refuse_unsupported(request)
    model = await frontend.model(request.model, key)
    with frontend.media.held(frontend.clock() + frontend.settings.request_deadline_s, tenant_of(key).name) as media:
        plan = await plan_chat(request, "tokenize", model, frontend.threads, media)
    return model, list(plan.prompts[0].token_ids), unknown


def _json(answer: msgspec.Struct, unknown: list[str]) -> Response:
    return Response(encode(answer), headers=without_effect_header(unknown), media_type="application/json")
