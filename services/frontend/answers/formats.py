"""What an answer looks like to a client: one object for a whole answer, one event for each chunk of a stream."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.frontend.answers.choice import ChoicePiece, Finish, TokenPosition
from services.frontend.answers.schema import CascadeFacts, Usage
from services.frontend.text.model_text import ModelText


@dataclass(frozen=True, slots=True)
class AnswerHeader:
    """What is the same in every part of an answer."""

    request_id: str
    created_unix_s: int
    model: str
    text: ModelText
    logprobs: bool
    """Whether the client asked for them."""
    include_usage: bool
    """Whether a stream ends with the usage."""
    cascade: CascadeFacts | msgspec.UnsetType = msgspec.UNSET
    """How a cascade came to the answer."""


@dataclass(frozen=True, slots=True)
class WholeChoice:
    """A finished choice."""

    index: int
    text: str
    positions: Sequence[TokenPosition]
    finish: Finish


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The only choice of an answer that is known as a whole before any of it is sent."""

    text: str
    positions: Sequence[TokenPosition]
    finish: Finish
    usage: Usage


class StreamFormat(Protocol):
    """Of one streamed answer."""

    def first_events(self) -> bytes:
        """What a stream begins with, before any token."""

    def event(self, piece: ChoicePiece) -> bytes:
        """A chunk of a stream."""

    def usage_event(self, usage: Usage) -> bytes:
        """The last chunk, where the client asked for it."""


class AnswerFormat(StreamFormat, Protocol):
    """Of one request."""

    def whole(self, choices: Sequence[WholeChoice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
