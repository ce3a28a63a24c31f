"""Calls that a grammar has made sure of, so that they need no format of the model's own."""

from enum import Enum, auto

from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta
from services.frontend.parsers.json_call import JsonCall


class NamedParser:
    """A `TextParser` for `tool_choice` with a function's name: all the text is its arguments."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> MessageDelta:
        to = DeltaBuilder()
        if text:
            to.call(0, self._name, text)
            self._name = None
        return to.built()

    def finish(self) -> MessageDelta:
        return MessageDelta()


class _At(Enum):
    ARRAY = auto()
    """Before the array."""
    BETWEEN = auto()
    IN_CALL = auto()
    END = auto()
    TEXT = auto()
    """This is no array of calls."""


class RequiredParser:
    """A `TextParser` for `tool_choice: required`: a JSON array of {"name": ..., "parameters": {...}}."""

    def __init__(self) -> None:
        self._at = _At.ARRAY
        self._call = JsonCall(0, ("parameters",))
        self._calls = 0

    def push(self, text: str) -> MessageDelta:
        to = DeltaBuilder()
        while text:
            if self._at is _At.IN_CALL:
                text = self._read_call(text, to)
            elif self._at is _At.TEXT:
                to.say(text)
                text = ""
            else:
                text = self._step(text)
        return to.built()

    def finish(self) -> MessageDelta:
        to = DeltaBuilder()
        if self._at is _At.IN_CALL and not self._call.has_begun:
            to.say(self._call.taken_back())
        return to.built()

    def _step(self, text: str) -> str:
        text = text.lstrip(" \t\r\n,")
        match self._at, text[:1]:
            case _, "":
                return ""
            case _At.END, _:
                return ""
            case _At.ARRAY, "[":
                self._at = _At.BETWEEN
            case _At.BETWEEN, "]":
                self._at = _At.END
            case _At.BETWEEN, "{":
                self._at = _At.IN_CALL
                self._call = JsonCall(self._calls, ("parameters",))
                return text
            case _:
                self._at = _At.TEXT
                return text
        return text[1:]

    def _read_call(self, text: str, to: DeltaBuilder) -> str:
        rest = self._call.read(text, to)
        if self._call.has_ended and self._call.has_begun:
            self._at, self._calls = _At.BETWEEN, self._calls + 1
        elif self._call.has_ended or self._call.is_broken:
            self._at = _At.TEXT
            to.say(self._call.taken_back())
        return rest
