"""Tokens and failures of requests, as they are sent to the frontends."""

from dataclasses import dataclass
from enum import StrEnum

from controlplane.model.queue_belief import PresentLoad
from controlplane.model.request import TokenDelta


class FailureCode(StrEnum):
    """Why the worker, rather than the engine, ended a request."""

    REFUSED = "refused"
    """The request can never be served here."""
    UNAVAILABLE = "unavailable"
    """Not now; another worker may take it."""
    ENGINE = "engine"
    """The engine died or broke its contract."""
    DEADLINE = "deadline"
    """The request's own deadline passed."""
    LOST = "lost"
    """Nobody is known to own it after a failed migration."""
    ADOPTED = "adopted"
    """Another frontend has it, with its client."""
    BOUNCED = "bounced"
    """More waits here than whoever placed it could know: it is placed again. Nothing has failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a request that did not come from the engine."""

    request_id: str
    offset: int
    """Number of generated tokens that the stream was told of before."""
    code: FailureCode
    message: str
    present: PresentLoad | None = None
    """What the instance has, of one that was bounced."""


Delta = TokenDelta | Failure
