"""Cohere's embeddings: its request in terms of OpenAI's, and its answer."""

from collections.abc import Sequence
from typing import Any

from services.frontend.errors import bad_request
from services.frontend.placement.pooler import Vectors
from services.frontend.pooling.inputs import WHOLE_CONTEXT
from services.frontend.pooling.numbers import in_base64, in_bits
from services.frontend.pooling.schema import (
    BilledUnits,
    CohereContent,
    CohereEmbeddings,
    CohereEmbedRequest,
    CohereMeta,
    EmbeddingRequest,
    VectorsByType,
)
from services.frontend.requests.models import ServedModel


def as_embedding_request(body: CohereEmbedRequest, model: ServedModel) -> EmbeddingRequest:
    """The request for the same vectors. An instruction is a system's message where the model has a chat template, and
    stands before a text otherwise, as in vLLM. Raises ApiError (400)."""
    instruction = _instruction(body, model)
    fields: dict[str, Any] = {}
    if body.images is not None:
        message = f"`{model.name}` is served with text only."
        raise bad_request(message, "images", "unsupported_parameter")
    if body.inputs is not None:
        contents = [
            [_text(_text_of(part, f"inputs[{index}].content[{at}]")) for at, part in enumerate(each.content)]
            for index, each in enumerate(body.inputs)
        ]
        fields["messages"] = [_conversation(content, instruction) for content in contents]
    elif instruction is None:
        fields["input"] = body.texts
    elif model.text.template is None:
        fields["input"] = [instruction + text for text in body.texts or ()]
    else:
        fields["messages"] = [_conversation([_text(text)], instruction) for text in body.texts or ()]
    if (body.max_tokens or 0) > model.max_model_len_tokens:
        message = f"`max_tokens` is greater than the model's context of {model.max_model_len_tokens} tokens."
        raise bad_request(message, "max_tokens")
    if body.truncate != "NONE":
        fields["truncate_prompt_tokens"] = body.max_tokens or WHOLE_CONTEXT
        fields["truncation_side"] = "left" if body.truncate == "START" else None
    return EmbeddingRequest(dimensions=body.output_dimension, **fields)


def check_lengths(body: CohereEmbedRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Raises ApiError (400) for an input beyond `max_tokens` that may not be cut."""
    longest = max(map(len, prompts))
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        message = f"An input has {longest} tokens, and `max_tokens` is {body.max_tokens}: let it be cut by `truncate`."
        raise bad_request(message, "max_tokens")


def embeddings(body: CohereEmbedRequest, request_id: str, rows: Sequence[Vectors], tokens: int) -> CohereEmbeddings:
    """Raises ApiError (400) for vectors that have no binary form."""
    by_type = VectorsByType()
    for kind in body.embedding_types or ("float",):
        match kind:
            case "float":
                by_type.floats = [each[0].tolist() for each in rows]
            case "base64":
                by_type.base64 = [in_base64(each, "float32", "little") for each in rows]
            case "binary":
                by_type.binary = in_bits(rows, is_signed=True)
            case "ubinary":
                by_type.ubinary = in_bits(rows, is_signed=False)
    answer = CohereEmbeddings(request_id, by_type, CohereMeta(BilledUnits(tokens)))
    if body.texts is not None:
        answer.texts = body.texts
    return answer


def _instruction(body: CohereEmbedRequest, model: ServedModel) -> str | None:
    """What the model wants to be told of the use of its vectors. Raises ApiError (400) for a use that it does not
    know."""
    if body.input_type is None:
        return None
    known = model.text.instructions
    if body.input_type not in known:
        served = f"it knows {', '.join(sorted(known))}" if known else "it has instructions for none"
        raise bad_request(f"Unsupported input_type {body.input_type!r} of `{model.name}`: {served}.", "input_type")
    return known[body.input_type] or None


def _conversation(content: list[dict[str, Any]], instruction: str | None) -> list[dict[str, Any]]:
    system = [] if instruction is None else [{"role": "system", "content": [_text(instruction)]}]
    return [*system, {"role": "user", "content": content}]


def _text_of(part: CohereContent, param: str) -> str:
    """Raises ApiError (400) for an image."""
    if part.type != "text" or part.text is None:
        raise bad_request("Pooling models are served with text only.", param, "unsupported_parameter")
    return part.text


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
