"""Answers that have ended and may still be asked for: by a client that lost its connection just before the end.

Pure. Bounded by number and by tokens, for a token is what fills the memory; the oldest go first.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from controlplane.model.request import EngineRequest, FinishReason

MAX_KEPT: Final = 1024
MAX_KEPT_TOKENS: Final = 1_000_000
"""Some 40 MB."""


@dataclass(frozen=True, slots=True)
class FinishedTail:
    """A finished request with all its tokens, for a client that comes back for the rest of its answer."""

    request: EngineRequest
    """The request with all tokens that were generated."""
    finish_reason: FinishReason | None
    """None: its frontend had all that its client wanted, which ends at a stop string."""
    cached_tokens: int | None
    epoch: int

    @property
    def tokens(self) -> int:
        """Prompt and generated tokens that are kept in memory for it."""
        return len(self.request.prompt_token_ids) + len(self.request.emitted_token_ids)


class FinishedTails:
    """Kept until the second `turn` after they came, so for one to two periods of it."""

    def __init__(self) -> None:
        self._tails: OrderedDict[str, FinishedTail] = OrderedDict()
        self._tokens = 0
        self._turns = 0
        self._came_at: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._tails)

    def keep(self, tail: FinishedTail) -> None:
        """Remember one, forgetting the oldest where there is no room."""
        request_id = tail.request.request_id
        self.forget(request_id)
        self._tails[request_id] = tail
        self._came_at[request_id] = self._turns
        self._tokens += tail.tokens
        while len(self._tails) > MAX_KEPT or self._tokens > MAX_KEPT_TOKENS:
            self.forget(next(iter(self._tails)))

    def of(self, client_request_id: str) -> list[FinishedTail]:
        """The choices of a client's request that have ended."""
        tails = self._tails.values()
        return [
            tail for tail in tails if tail.request.resume and tail.request.resume.client_request_id == client_request_id
        ]

    def forget(self, request_id: str) -> None:
        """Drop one, if it is here."""
        tail = self._tails.pop(request_id, None)
        if tail is not None:
            self._tokens -= tail.tokens
            del self._came_at[request_id]

    def turn(self) -> None:
        """End a period: requests that ended before the previous one are forgotten. Call it at a steady interval."""
        self._turns += 1
        for request_id in [each for each, came_at in self._came_at.items() if self._turns - came_at >= 2]:
            self.forget(request_id)
