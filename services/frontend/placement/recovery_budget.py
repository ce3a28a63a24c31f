"""How often and how soon a request that keeps losing its owner is placed again. Pure; time is an argument."""

from dataclasses import dataclass
from typing import Final

FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0


@dataclass(slots=True)
class RecoveryBudget:
    """Of one request.

    Losses count only as long as the request gains no token: workers that are restarted one after another take nothing
    from a request that goes on between them. A number of losses alone is no bound either, because a request that waits
    in the queues of three workers that die in turn has done nothing wrong. So both have to be used up. The pauses are
    what protects the mesh from a request that kills every engine it is given to: they double, so with the defaults
    it meets about ten.
    """

    max_losses: int
    """Without a token between them."""
    patience_s: float
    """Without a token, since the first of these losses."""
    losses: int = 0
    """Since the request last gained a token."""
    _tokens: int = 0
    _since_s: float = 0.0

    def lost(self, emitted_tokens: int, now_s: float) -> float | None:
        """The request has lost its owner, having `emitted_tokens` in all: how long to wait, in seconds, before it is
        placed again. None: never."""
        if self.losses == 0 or emitted_tokens > self._tokens:
            self.losses, self._since_s, self._tokens = 0, now_s, emitted_tokens
        if self.losses >= self.max_losses and now_s - self._since_s >= self.patience_s:
            return None
        self.losses += 1
        return 0.0 if self.losses == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.losses - 2))
