"""Hermes' format, that of Qwen 2.5 and Qwen 3 too: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from typing import Final

from services.frontend.parsers.content import ContentGate
from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta
from services.frontend.parsers.json_call import JsonCall
from services.frontend.parsers.tags import TagReader

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesParser:
    """A `TextParser`. A tag within a string of the arguments is part of that string; what is no call stays text."""

    def __init__(self) -> None:
        self._tags = TagReader()
        self._content = ContentGate()
        self._call: JsonCall | None = None
        self._calls = 0
        self._is_text = False
        """What follows the tag is no call."""

    def push(self, text: str) -> MessageDelta:
        to = DeltaBuilder()
        while text:
            text = self._read_content(text, to) if self._call is None else self._read_call(self._call, text, to)
        return to.built()

    def finish(self) -> MessageDelta:
        to = DeltaBuilder()
        rest = self._tags.rest()
        if self._call is None or self._is_text:
            self._content.say(rest, to)
        elif not self._call.has_begun:
            self._content.say(_BEGIN + self._call.taken_back(), to)
        self._content.finish(to, had_calls=self._calls > 0)
        return to.built()

    def _read_content(self, text: str, to: DeltaBuilder) -> str:
        before, tag, behind = self._tags.read(text, (_BEGIN,))
        self._content.say(before, to)
        if tag is not None:
            self._call = JsonCall(self._calls, ("arguments",))
        return behind

    def _read_call(self, call: JsonCall, text: str, to: DeltaBuilder) -> str:
        if not (call.has_ended or call.is_broken):
            had_begun = call.has_begun
            text = call.read(text, to)
            if call.has_begun and not had_begun:
                self._calls += 1
                self._content.call()
            if not (call.has_ended or call.is_broken):
                return text
        return self._read_end(call, text, to)

    def _read_end(self, call: JsonCall, text: str, to: DeltaBuilder) -> str:
        """Behind the object, and where there is no object."""
        if not (call.has_begun or self._is_text):
            self._is_text = True
            self._content.say(_BEGIN + call.taken_back(), to)
        between, tag, behind = self._tags.read(text, (_BEGIN, _END))
        if self._is_text:
            self._content.say(between, to)
        if tag is None:
            return behind
        if self._is_text and tag == _END:
            self._content.say(_END, to)
        self._call = JsonCall(self._calls, ("arguments",)) if tag == _BEGIN else None
        self._is_text = False
        return behind
