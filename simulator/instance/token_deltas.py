"""What a step tells of a request whose tokens somebody reads."""

from controlplane.model.request import FinishReason, PositionLogprobs, TokenDelta
from mesh.errors import IllegalTransition
from simulator.instance.sequence import Sequence


def token_delta(sequence: Sequence, tokens: int) -> TokenDelta:
    """The generated tokens up to `tokens` (prompt included) that have not been told yet; marks them as told."""
    text = sequence.text
    if text is None:
        raise IllegalTransition(f"{sequence.story()} has no token ids to tell")
    offset = sequence.reported_tokens - sequence.prompt_tokens
    end = tokens - sequence.prompt_tokens
    sequence.reported_tokens = tokens
    logprobs: tuple[PositionLogprobs, ...] = ()
    if text.sampling.logprobs is not None:
        logprobs = tuple(text.script.logprobs(position) for position in range(offset, end))
    return TokenDelta(
        request_id=sequence.request_id,
        offset=offset,
        token_ids=tuple(text.script.token_ids(offset, end)),
        logprobs=logprobs,
        finish_reason=sequence.finish_reason if tokens == sequence.total_tokens else None,
        cached_tokens=None if sequence.started else sequence.cached_prompt_tokens,
        prompt_logprobs=() if sequence.started else text.script.prompt_logprobs(),
    )


def abort_delta(sequence: Sequence) -> TokenDelta:
    """The last word on a request that was taken back."""
    return TokenDelta(
        request_id=sequence.request_id,
        offset=sequence.reported_tokens - sequence.prompt_tokens,
        token_ids=(),
        finish_reason=FinishReason.ABORT,
    )
