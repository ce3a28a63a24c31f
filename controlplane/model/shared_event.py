"""What schedulers tell each other, so that two of them do not fill the same instance before it reports."""

from enum import StrEnum
from typing import Final

import msgspec


class SharedKind(StrEnum):
    """Kinds of events that schedulers share about a request at an instance."""

    PREFILL = "prefill"
    """It was placed there."""
    DECODE = "decode"
    """It is to be decoded there after its prefill elsewhere."""
    ARRIVING = "arriving"
    """The same, with its prefill done."""
    ENDED = "ended"
    """It is over, or does not come."""


PLACED_KINDS: Final = (SharedKind.PREFILL, SharedKind.DECODE, SharedKind.ARRIVING)


class SharedEvent(msgspec.Struct, frozen=True, omit_defaults=True):
    """A placement, or the end of one, that one scheduler publishes to the others."""

    kind: SharedKind
    request_id: str
    instance_id: str
    tokens: int = 0
    """To prefill or, for decodes, of context."""
    origin: str = ""
    """The scheduler that told of it."""
