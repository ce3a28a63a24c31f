"""From vLLM's per-request outputs to the mesh's token deltas. Pure: it needs the shape of vLLM's objects only."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from controlplane.model.request import FinishReason, PositionLogprobs, TokenDelta, TokenLogprob

_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class Logprob(Protocol):
    """The fields that are read of `vllm.logprobs.Logprob`, so that this module needs no vLLM."""

    logprob: float
    rank: int | None


PromptLogprobs: TypeAlias = Sequence[Mapping[int, Logprob] | None]
"""`vllm.outputs.RequestOutput.prompt_logprobs`: of each token of the prompt; None for the first one."""


class Completion(Protocol):
    """The fields that are read of `vllm.outputs.CompletionOutput`, of output kind DELTA."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    finish_reason: str | None


def token_delta(
    request_id: str,
    offset: int,
    completion: Completion,
    *,
    logprobs: int | None,
    named_token_ids: Sequence[int] = (),
    cached_tokens: int | None,
    queued_ms: float | None = None,
    prompt_logprobs: tuple[PositionLogprobs, ...] = (),
) -> TokenDelta:
    """What one step added to a request. `logprobs` is the number of rivals asked for at each position, or
    `named_token_ids` are those whose logprobs are wanted in their place."""
    reason = completion.finish_reason
    finish_reason = None if reason is None else _FINISH_REASONS.get(reason, FinishReason.ERROR)
    return TokenDelta(
        request_id=request_id,
        offset=offset,
        token_ids=tuple(completion.token_ids),
        logprobs=_logprobs(completion, logprobs, named_token_ids),
        finish_reason=finish_reason,
        error=f"vLLM ended the request: {reason}" if finish_reason is FinishReason.ERROR else "",
        cached_tokens=cached_tokens,
        queued_ms=queued_ms,
        prompt_logprobs=prompt_logprobs,
    )


def prompt_positions(token_ids: Sequence[int], candidates: PromptLogprobs, rivals: int) -> tuple[PositionLogprobs, ...]:
    """Of each token of a prompt of `token_ids` but the first."""
    return tuple(
        _position(token_id, candidate, rivals)
        for token_id, candidate in zip(token_ids, candidates, strict=False)
        if candidate is not None
    )


def _logprobs(completion: Completion, rivals: int | None, named: Sequence[int]) -> tuple[PositionLogprobs, ...]:
    if rivals is None or completion.logprobs is None:
        return ()
    return tuple(
        _named_position(token_id, candidates, named) if named else _position(token_id, candidates, rivals)
        for token_id, candidates in zip(completion.token_ids, completion.logprobs, strict=True)
    )


def _named_position(chosen: int, candidates: Mapping[int, Logprob], named: Sequence[int]) -> PositionLogprobs:
    # The ranks of all but the chosen token count their places in the list.
    top = (TokenLogprob(token_id, candidates[token_id].logprob) for token_id in dict.fromkeys((chosen, *named)))
    return PositionLogprobs(TokenLogprob(chosen, candidates[chosen].logprob, candidates[chosen].rank or 0), tuple(top))


def _position(chosen: int, candidates: Mapping[int, Logprob], rivals: int) -> PositionLogprobs:
    # vLLM gives the chosen token and the most likely ones, which may include it, with their ranks from 1.
    ranked = sorted(
        (candidate.rank, token_id, candidate.logprob)
        for token_id, candidate in candidates.items()
        if candidate.rank is not None and candidate.rank <= rivals
    )
    return PositionLogprobs(
        chosen=TokenLogprob(chosen, candidates[chosen].logprob, candidates[chosen].rank or 0),
        top=tuple(TokenLogprob(token_id, logprob) for _, token_id, logprob in ranked[:rivals]),
    )
