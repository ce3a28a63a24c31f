"""What source and target say to each other. Every message may be lost, doubled or late."""

from dataclasses import dataclass
from typing import TypeAlias

from controlplane.model.request import EngineRequest


@dataclass(frozen=True, slots=True)
class Offer:
    """Source: will you take this request? `request` is as it stood when the offer was made."""

    migration_id: str
    request: EngineRequest
    epoch: int
    """The epoch under which the target would own the request."""
    frontend_id: str
    """Where the target sends the tokens."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Target: blocks are reserved."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """Target: no, and nothing is reserved."""

    migration_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """Source: these blocks of the request are complete and will not change; pull them."""

    migration_id: str
    number: int
    """Counts from 1."""
    first_block: int
    block_count: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """Target: the blocks of this round are here."""

    migration_id: str
    number: int


@dataclass(frozen=True, slots=True)
class FinalMessage:
    """Source: the request is paused, and this is all of it. Pull the last blocks, then it is yours."""

    migration_id: str
    emitted_token_ids: tuple[int, ...]
    computed_tokens: int
    """Prompt and generated tokens whose KV is in the blocks."""
    first_block: int
    block_count: int
    """The last of them is usually partly filled."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Target: the request is mine and runs."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """Target: I hold nothing of it and shall never run it."""

    migration_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Source: drop it, unless you have committed; answer Failed or Committed."""

    migration_id: str
    reason: str


ToTarget: TypeAlias = Offer | Round | FinalMessage | Abort
ToSource: TypeAlias = Accept | Refuse | Pulled | Committed | Failed
