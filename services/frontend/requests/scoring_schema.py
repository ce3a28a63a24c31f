"""POST /generative_scoring, vLLM's own: how likely a token is behind a query and each of several items."""

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from controlplane.model.request import MAX_NAMED_LOGPROBS
from controlplane.model.sampling import INT32_MAX
from mesh.runtime import Threads
from services.frontend.errors import bad_request
from services.frontend.requests.models import ServedModel
from services.frontend.requests.schema import CacheSalt, TokenId

AS_IT_IS: Final = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
"""The model's own distribution, whatever its generation_config.json says: engines may be set to tell logprobs behind
these (`logprobs_mode`)."""


class ScoringRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /generative_scoring"""

    model: Annotated[str, Meta(max_length=256)] = ""
    """May be left out where there is one model."""
    query: str | list[TokenId]
    """A text, or its token ids."""
    items: Annotated[list[str | list[TokenId]], Meta(min_length=1)]
    """Texts, or the token ids of each."""
    label_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_NAMED_LOGPROBS)]
    """An item's score is how likely the first of these follows it."""
    apply_softmax: bool = True
    """Among `label_token_ids`; if false, among all tokens of the model."""
    item_first: bool = False
    """An item stands before the query."""
    add_special_tokens: bool = True
    """Those that the model wants around a text stand around the query."""
    cache_salt: CacheSalt | None = None
    """Only prompts of the same salt find this one's KV in the prefix cache."""
    priority: Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)] | None = None
    """Lower is served first."""
    request_id: str | None = None
    """The client's own id of the request; the header `x-request-id` goes before it."""


async def scoring_prompts(request: ScoringRequest, model: ServedModel, threads: Threads) -> list[list[int]]:
    """A prompt for each item. One that leaves no room for a token behind it loses its end, as in vLLM. Raises ApiError
    (400)."""
    if len({type(item) for item in request.items}) > 1:
        raise bad_request("`items` must hold only texts, or only lists of token ids.", "items")
    query = await _token_ids(request.query, model, threads)
    if isinstance(request.query, str) and request.add_special_tokens:
        query = model.text.with_added_tokens(query)
    prompts, most_tokens = [], model.max_model_len_tokens - 1
    for item in request.items:
        token_ids = await _token_ids(item, model, threads)
        prompts.append((token_ids + query if request.item_first else query + token_ids)[:most_tokens])
    return prompts


async def _token_ids(source: str | list[int], model: ServedModel, threads: Threads) -> list[int]:
    if not isinstance(source, str):
        return source
    return await model.text.chunked.encode_in(threads, model.text.enough_for(source, model.max_model_len_tokens))


def completion_body(request: ScoringRequest, prompts: list[list[int]]) -> dict[str, Any]:
    """The completion that says how likely the labels are."""
    return {**AS_IT_IS, **one_token(request, prompts, request.label_token_ids)}


def one_token(request: msgspec.Struct, prompts: list[list[int]], label_token_ids: list[int]) -> dict[str, Any]:
    """A completion of one token behind each prompt, with the logprobs of the labels. `request`: has `cache_salt`,
    `priority` and `request_id`."""
    given = {name: getattr(request, name) for name in ("cache_salt", "priority", "request_id")}
    return {
        "prompt": prompts,
        "max_tokens": 1,
        "logprobs": 0,
        "logprob_token_ids": label_token_ids,
        "return_tokens_as_token_ids": True,
        **{name: value for name, value in given.items() if value is not None},
    }
