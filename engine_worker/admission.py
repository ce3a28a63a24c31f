"""What a worker refuses before its engine sees it. Limits of the model itself (context length, vocabulary) are
the engine's to check."""

import math

from controlplane.model.media import MODALITIES, PromptMedia
from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.model.sampling import parameters


def refusal(request: EngineRequest, *, asked_model: str, served_model: str) -> str | None:
    """Why this worker can never serve `request`, or None if nothing is wrong with it."""
    if not request.request_id:
        return "request_id is empty; every request needs one"
    if asked_model != served_model:
        return f"this worker serves {served_model!r}, not {asked_model!r}"
    if not request.prompt_token_ids:
        return "the prompt is empty; send at least one token"
    if len(request.emitted_token_ids) >= request.sampling.max_tokens:
        return (
            f"nothing is left to generate: max_tokens is {request.sampling.max_tokens} and "
            f"{len(request.emitted_token_ids)} tokens were emitted already"
        )
    if (
        request.media is not None
        and (wrong := _media_refusal(request.media, len(request.prompt_token_ids))) is not None
    ):
        return wrong
    return _sampling_refusal(request.sampling)


def _media_refusal(media: PromptMedia, prompt_tokens: int) -> str | None:
    if not media.is_whole:
        return "its images, recordings or films were left behind by a frontend that ended; ask again"
    for item in media.items:
        if item.modality not in MODALITIES:
            return f"{item.modality!r} is none of {', '.join(MODALITIES)}"
    hashes = {item.media_hash for item in media.items}
    end = 0
    for span in media.spans:
        if span.offset < end or not span.length or span.end > prompt_tokens or span.media_hash not in hashes:
            return f"its prompt of {prompt_tokens} tokens has no place for {span}"
        end = span.end
    return None


def _sampling_refusal(sampling: SamplingParams) -> str | None:
    for name, parameter in parameters(SamplingParams).items():
        if (wrong := parameter.refusal(getattr(sampling, name))) is not None:
            return wrong
    if sampling.min_tokens > sampling.max_tokens:
        return f"min_tokens must be at most max_tokens ({sampling.max_tokens}), got {sampling.min_tokens}"
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            return f"logit_bias of token {token_id} must be finite, got {bias}"
    return None
