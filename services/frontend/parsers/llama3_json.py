"""Llama 3's format: {"name": ..., "parameters": {...}}, several with semicolons between, <|python_tag|> before or not.

An answer that begins in another way is text, to its end.
"""

from enum import Enum, auto
from typing import Final

from services.frontend.parsers.content import ContentGate
from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta
from services.frontend.parsers.json_call import JsonCall
from services.frontend.parsers.tags import undecided

_TAG: Final = "<|python_tag|>"
_ARGUMENTS: Final = ("parameters", "arguments")
_BETWEEN: Final = " \t\r\n;,"
_MAX_HELD_CHARACTERS: Final = 64
"""Blanks before a call; an answer that begins with more of them is text."""


class _At(Enum):
    START = auto()
    """Before the first character that says whether there are calls."""
    BETWEEN = auto()
    """Behind the tag or a call: another call may follow."""
    IN_CALL = auto()
    TEXT = auto()
    """To the end."""


class Llama3JsonParser:
    """A `TextParser`. JSON without a name is no call: it is shown once that is known."""

    def __init__(self) -> None:
        self._at = _At.START
        self._held = ""
        self._content = ContentGate()
        self._call = JsonCall(0, _ARGUMENTS)
        self._calls = 0

    def push(self, text: str) -> MessageDelta:
        to = DeltaBuilder()
        text = self._held + text
        self._held = ""
        while text:
            match self._at:
                case _At.START:
                    text = self._start(text, to)
                case _At.BETWEEN:
                    text = self._between(text)
                case _At.IN_CALL:
                    text = self._read_call(text, to)
                case _At.TEXT:
                    self._content.say(text, to)
                    text = ""
        return to.built()

    def finish(self) -> MessageDelta:
        to = DeltaBuilder()
        if self._at is _At.IN_CALL and not self._call.has_begun:
            self._content.say(self._call.taken_back(), to)
        self._content.say(self._held, to)
        self._content.finish(to, had_calls=self._calls > 0)
        return to.built()

    def _start(self, text: str, to: DeltaBuilder) -> str:
        words = text.lstrip()
        if undecided(words, (_TAG,)) == len(words) and len(text) <= _MAX_HELD_CHARACTERS:
            self._held = text
            return ""
        if words.startswith(_TAG):
            self._at = _At.BETWEEN
            return words[len(_TAG) :]
        if words.startswith("{"):
            self._at = _At.BETWEEN
            self._content.say(text[: len(text) - len(words)], to)
            return words
        self._at = _At.TEXT
        return text

    def _between(self, text: str) -> str:
        call = text.lstrip(_BETWEEN)
        if not call:
            return ""
        if call[0] != "{":
            self._at = _At.TEXT
            return call
        self._at = _At.IN_CALL
        self._call = JsonCall(self._calls, _ARGUMENTS)
        return call

    def _read_call(self, text: str, to: DeltaBuilder) -> str:
        call, had_begun = self._call, self._call.has_begun
        rest = call.read(text, to)
        if call.has_begun and not had_begun:
            self._calls += 1
            self._content.call()
        if call.has_ended or call.is_broken:
            if call.has_begun:
                self._at = _At.BETWEEN
            else:
                self._at = _At.TEXT
                self._content.say(call.taken_back(), to)
        return rest
