"""Bounds of the bid-ask protocol."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BidAskLimits:
    """How long, how often and how many; all times in milliseconds."""

    bids_ms: float = 150.0
    """The choice is made among the bids that have come by then, or as soon as all candidates have answered."""
    award_ms: float = 1_000.0
    """Without the receiver's acceptance by then the promise is withdrawn."""
    promise_ms: float = 30_000.0
    """No transfer begins later than this after its award."""
    transfer_ms: float = 130_000.0
    """No transfer takes longer; whoever carries them out sees to it."""
    resend_ms: float = 100.0
    """An unanswered message is sent again after this."""
    probe_ms: float = 1_000.0
    """A receiver asks after a transfer this often, in case its end was not heard."""
    retry_ms: float = 20.0
    """A request whose sender was busy is not attempted again before this has passed."""
    starving_after: int = 5
    """Failed attempts after which the receiver asks to be next."""
    outgoing: int = 1
    """Transfers from one instance at once: a sender that transmits is busy (section 4.4)."""
    incoming: int = 3
    """Transfers to one instance at once (section 5)."""
    earliest: int = 3
    """Bids that are kept for their early start (section 4.4)."""
    deals: int = 64
    """Requests that one sender offers at once; others wait, running."""
    queued: int = 64
    """Requests promised to one receiver at once."""
    throughput_tokens_s: float = 100_000.0
    """Of transfers to an instance that has measured none yet."""
