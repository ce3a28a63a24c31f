"""What whoever placed a request believed of its instance, and what the instance says of itself."""

import msgspec


class QueueBelief(msgspec.Struct, frozen=True):
    """Goes with a request from its placement to its worker."""

    queued_prefill_tokens: int
    """Prompt tokens that the instance was believed to compute before those of this request."""
    new_prefill_tokens: int
    """Prompt tokens of this request that it was believed to have to compute."""
    may_bounce: bool = True
    """Whether the worker may give the request back because more waits there."""


class PresentLoad(msgspec.Struct, frozen=True):
    """Of an instance that has given a request back."""

    queued_prefill_tokens: int
    requests: int
    """Running and queued ones."""
