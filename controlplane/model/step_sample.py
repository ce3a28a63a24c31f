"""One engine step as it ran: what was in it and how long it took."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSample:
    """Lengths of contexts count the token that the step computes."""

    duration_ms: float
    prefill_tokens: int
    """Prompt tokens that the step computed."""
    attended_pairs: float
    """Pairs of a prompt token and a token that it attends to, itself included, over all prompt tokens computed."""
    decode_requests: int
    context_tokens: int
    """Sum over the decoding requests."""
    longest_context_tokens: int
    """Context length of the longest decoding request."""
