"""What a piece of text adds to a message, and who reads it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is added to one call of a tool."""

    index: int
    """Of the call among those of its message."""
    name: str | None = None
    """On the first delta of a call, whole; None on all others."""
    arguments: str = ""
    """What follows of its arguments, which are JSON in the end."""
    id: str = ""
    """Where the format says it, with the name; empty: any will do."""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What a piece of text adds to a message. May be empty."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallDelta] = ()
    reasoning_tokens: int | None = None
    """Of the whole answer, where the parser process has read its end."""

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class TextParser(Protocol):
    """Reads one answer. All that it has told at any moment depends on the text so far, not on where it was cut: a
    stream that is resumed goes on where it stood. What it costs to read a piece does not grow with what came before."""

    def push(self, text: str) -> MessageDelta:
        """What this piece adds."""

    def finish(self) -> MessageDelta:
        """What was held back. The text is over, complete or not."""


class DeltaBuilder:
    """Gathers what one piece of text adds."""

    __slots__ = ("_calls", "_content", "_reasoning", "reasoning_tokens")

    def __init__(self) -> None:
        self._reasoning = ""
        self._content = ""
        self._calls: list[CallDelta] = []
        self.reasoning_tokens: int | None = None

    def reason(self, text: str) -> None:
        self._reasoning += text

    def say(self, text: str) -> None:
        self._content += text

    def call(self, index: int, name: str | None = None, arguments: str = "", call_id: str = "") -> None:
        """Adds to a call; what is added to the same call in a row becomes one delta."""
        if self._calls and self._calls[-1].index == index and name is None:
            before = self._calls.pop()
            self._calls.append(CallDelta(index, before.name, before.arguments + arguments, before.id))
        elif name is not None or arguments:
            self._calls.append(CallDelta(index, name, arguments, call_id))

    def add(self, delta: MessageDelta) -> None:
        self._reasoning += delta.reasoning
        self._content += delta.content
        for call in delta.calls:
            self.call(call.index, call.name, call.arguments, call.id)

    def built(self) -> MessageDelta:
        return MessageDelta(self._reasoning, self._content, tuple(self._calls), self.reasoning_tokens)
