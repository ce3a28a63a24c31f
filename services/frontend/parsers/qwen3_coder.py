"""The XML kind, of Qwen 3 Coder and others:

<tool_call><function=NAME><parameter=KEY>
VALUE
</parameter></function></tool_call>

Values are bare text; what type they are of is said by the tool's schema. Strings are passed on as they come, values of
other types when they are complete, because 12 and 12abc are written differently in JSON.
"""

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Final

from services.frontend.parsers.argument_types import typed, types_of
from services.frontend.parsers.content import ContentGate
from services.frontend.parsers.deltas import DeltaBuilder, MessageDelta
from services.frontend.parsers.tags import TagReader, undecided

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_FUNCTION: Final = "<function="
_END_OF_FUNCTION: Final = "</function>"
_PARAMETER: Final = "<parameter="
_END_OF_PARAMETER: Final = "</parameter>"
_STRING: Final = frozenset(("string",))
_MAX_HELD_CHARACTERS: Final = 64
"""Blanks between the tag and the function; more of them make it text."""


class _At(Enum):
    CONTENT = auto()
    PREAMBLE = auto()
    """Behind <tool_call>."""
    FUNCTION = auto()
    """Within the name of the function."""
    ARGUMENTS = auto()
    """Between parameters."""
    KEY = auto()
    """Within the name of a parameter."""
    VALUE = auto()
    BEHIND = auto()
    """Behind </function>."""


class Qwen3CoderParser:
    """A `TextParser`."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: of the parameters of each tool, by the tool's name and the parameter's."""
        self._schemas = schemas
        self._at = _At.CONTENT
        self._tags = TagReader()
        self._content = ContentGate()
        self._calls = 0
        self._name: list[str] = []
        """Of the function or parameter that is being named."""
        self._preamble = ""
        self._function = ""
        self._has_parameters = False
        self._types = _STRING
        self._value: list[str] = []
        """Of a parameter that is no string, so far."""
        self._is_first = True
        """Nothing of the value has come."""
        self._newline = False
        """The value's last line end is held back: the one before the closing tag is no part of it."""

    def push(self, text: str) -> MessageDelta:
        to = DeltaBuilder()
        while text:
            text = self._read(text, to)
        return to.built()

    def finish(self) -> MessageDelta:
        """See `TextParser`. Arguments that were cut off stay so."""
        to = DeltaBuilder()
        rest = self._tags.rest()
        if self._at is _At.CONTENT:
            self._content.say(rest, to)
        elif self._at is _At.PREAMBLE:
            self._content.say(_BEGIN + self._preamble, to)
        self._content.finish(to, had_calls=self._calls > 0)
        return to.built()

    def _read(self, text: str, to: DeltaBuilder) -> str:
        match self._at:
            case _At.CONTENT:
                before, tag, text = self._tags.read(text, (_BEGIN, _FUNCTION))
                self._content.say(before, to)
                self._go_to(tag)
            case _At.PREAMBLE:
                text = self._read_preamble(text, to)
            case _At.FUNCTION:
                name, tag, text = self._tags.read(text, (">", _END_OF_FUNCTION))
                self._name.append(name)
                if tag is not None:
                    self._begin_call(to)
                    if tag == _END_OF_FUNCTION:
                        self._end_call(to)
            case _At.ARGUMENTS:
                _, tag, text = self._tags.read(text, (_PARAMETER, _END_OF_FUNCTION))
                self._go_on(tag, to)
            case _At.KEY:
                name, tag, text = self._tags.read(text, (">",))
                self._name.append(name)
                if tag is not None:
                    self._begin_value(to)
            case _At.VALUE:
                value, tag, text = self._tags.read(text, (_END_OF_PARAMETER, _PARAMETER, _END_OF_FUNCTION))
                self._add_value(value, to)
                if tag is not None:
                    self._end_value(to)
                    self._go_on(tag, to)
            case _At.BEHIND:
                # What stands between the function's end and the tag's is no text of the model's.
                _, tag, text = self._tags.read(text, (_END, _BEGIN, _FUNCTION))
                self._go_to(tag)
        return text

    def _go_to(self, tag: str | None) -> None:
        """Behind a tag outside of functions."""
        if tag == _BEGIN:
            self._at, self._preamble = _At.PREAMBLE, ""
        elif tag == _FUNCTION:
            self._at, self._name = _At.FUNCTION, []
        elif tag == _END:
            self._at = _At.CONTENT

    def _go_on(self, tag: str | None, to: DeltaBuilder) -> None:
        """Behind a tag within a function."""
        if tag == _PARAMETER:
            self._at, self._name = _At.KEY, []
        elif tag == _END_OF_PARAMETER:
            self._at = _At.ARGUMENTS
        elif tag == _END_OF_FUNCTION:
            self._end_call(to)

    def _read_preamble(self, text: str, to: DeltaBuilder) -> str:
        text = self._preamble + text
        begun = text.lstrip()
        if begun.startswith(_FUNCTION):
            self._go_to(_FUNCTION)
            return begun[len(_FUNCTION) :]
        if undecided(begun, (_FUNCTION,)) == len(begun) and len(text) <= _MAX_HELD_CHARACTERS:
            self._preamble = text
            return ""
        self._content.say(_BEGIN, to)
        self._at = _At.CONTENT
        return text

    def _begin_call(self, to: DeltaBuilder) -> None:
        self._function = "".join(self._name).strip()
        self._at, self._has_parameters = _At.ARGUMENTS, False
        self._content.call()
        to.call(self._calls, self._function)
        self._calls += 1

    def _end_call(self, to: DeltaBuilder) -> None:
        to.call(self._calls - 1, arguments="}" if self._has_parameters else "{}")
        self._at = _At.BEHIND

    def _begin_value(self, to: DeltaBuilder) -> None:
        key = "".join(self._name)
        schemas = self._schemas.get(self._function) or {}
        self._types = types_of(schemas[key]) if key in schemas else _STRING
        self._at, self._value, self._is_first, self._newline = _At.VALUE, [], True, False
        opening = ", " if self._has_parameters else "{"
        quote = '"' if self._types == _STRING else ""
        self._has_parameters = True
        to.call(self._calls - 1, arguments=f"{opening}{_quoted(key)}: {quote}")

    def _add_value(self, text: str, to: DeltaBuilder) -> None:
        if not text:
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        if self._newline and text:
            text, self._newline = "\n" + text, False
        if text.endswith("\n"):
            text, self._newline = text[:-1], True
        if self._types == _STRING:
            to.call(self._calls - 1, arguments=_quoted(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self, to: DeltaBuilder) -> None:
        if self._types == _STRING:
            to.call(self._calls - 1, arguments='"')
        else:
            value = typed("".join(self._value), self._types)
            to.call(self._calls - 1, arguments=json.dumps(value, ensure_ascii=False))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
