"""What a worker refuses before its engine sees it. Limits of the model itself (context length, vocabulary) are
the engine's to check."""

import math

from controlplane.model.request import EngineRequest, SamplingParams


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
    return _sampling_refusal(request.sampling)


def _sampling_refusal(sampling: SamplingParams) -> str | None:
    checks = (
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < math.inf, "at least 0"),
        ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0, "above 0 and at most 1"),
        ("min_p", sampling.min_p, 0.0 <= sampling.min_p <= 1.0, "from 0 to 1"),
        ("presence_penalty", sampling.presence_penalty, math.isfinite(sampling.presence_penalty), "finite"),
        ("frequency_penalty", sampling.frequency_penalty, math.isfinite(sampling.frequency_penalty), "finite"),
        (
            "repetition_penalty",
            sampling.repetition_penalty,
            0.0 < sampling.repetition_penalty < math.inf,
            "above 0 and finite",
        ),
        (
            "min_tokens",
            sampling.min_tokens,
            sampling.min_tokens <= sampling.max_tokens,
            f"at most max_tokens ({sampling.max_tokens})",
        ),
    )
    for name, value, is_right, rule in checks:
        if not is_right:
            return f"{name} must be {rule}, got {value}"
    for token_id, bias in sampling.logit_bias:
        if not math.isfinite(bias):
            return f"logit_bias of token {token_id} must be finite, got {bias}"
    return None
