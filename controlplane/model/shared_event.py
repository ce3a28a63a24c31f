"""What schedulers tell each other, so that two of them do not fill the same instance before it reports."""

from enum import StrEnum
from typing import Final

import msgspec


class SharedKind(StrEnum):
    """Kinds of events that schedulers share about a request at an instance."""

    PREFILL = "prefill"
    """The request was placed on the instance."""
    DECODE = "decode"
    """It is to be decoded there after its prefill elsewhere."""
    ARRIVING = "arriving"
    """It is to be decoded there, and its prefill elsewhere is done."""
    ENDED = "ended"
    """The request has ended, or will not come."""


MAX_SHARED_MARKS: Final = 1024
"""Of a prompt, in one event."""
PLACED_KINDS: Final = (SharedKind.PREFILL, SharedKind.DECODE, SharedKind.ARRIVING)


class SharedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A placement, or the end of one, that one scheduler publishes to the others."""

    kind: SharedKind
    request_id: str
    instance_id: str
    tokens: int = 0
    """Tokens to prefill; for decodes, context tokens."""
    origin: str = ""
    """The scheduler that told of it."""
    marks: tuple[int, ...] = ()
    """Of a prompt that was placed: those that its instance did not have, see `expected_blocks`."""
    computed_ms: float = 0.0
    """Until then; 0: nobody knows."""
