"""When a worker gives a new request back because more waits there than whoever placed it could know. Pure.

Several that place requests hear of each other's placements late, and would all choose the same idle instance. So a
request bears what was believed of its instance. Where that is wrong by more than a slack, the worker answers with its
present load, and the request is placed again by whoever knows that now. The worker decides by `is_bounced`; how often
one request is given back is bounded by `RecoveryManager`, at its frontend.
"""

from typing import Final

from controlplane.model.queue_belief import PresentLoad, QueueBelief
from mesh.invariants import invariants

MAX_BOUNCES: Final = 3
"""Of one request; after that the instance that is chosen keeps it."""
SLACK_TOKENS: Final = 1024
"""Prompt tokens that may wait beyond what was believed: half a step of the usual token budget."""


def is_bounced(belief: QueueBelief | None, present: PresentLoad, slack_tokens: int) -> bool:
    """Whether a worker gives a request back. Never without a belief, as of requests that are placed without a look at
    loads, and of releases that know of none; never with a slack of 0, which turns it off."""
    if belief is None or not belief.may_bounce or not slack_tokens:
        return False
    return present.queued_prefill_tokens > belief.queued_prefill_tokens + slack_tokens


class QueuedPrefills:
    """Prompts that an instance has not computed yet, by the new tokens that their placements believed them to have.

    An engine may count a prompt in full until it has looked it up in its cache, where the placement counted what is new
    of it. So neither count alone is one that a belief can be held against: it is the smaller one that is.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._total = 0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, request_id: str, new_tokens: int) -> None:
        """The instance has taken a request, once or again."""
        self.done(request_id)
        self._tokens[request_id] = new_tokens
        self._total += new_tokens

    def done(self, request_id: str) -> None:
        """Its first token is out, or it is gone; unknown ones are left alone."""
        self._total -= self._tokens.pop(request_id, 0)

    def queued_tokens(self, engine_tokens: int) -> int:
        """Of an instance whose engine counts so many prompt tokens to compute."""
        return min(engine_tokens, self._total)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        assert all(tokens >= 0 for tokens in self._tokens.values()), "nothing takes tokens from the queue"
        assert self._total == sum(self._tokens.values()), "the sum is that of the prompts"
