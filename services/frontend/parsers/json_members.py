"""The members of a JSON object while it is being written.

Unlike a partial parser, which reads the object anew with every piece, this reads each character once; and it keeps the
text of values as the model wrote it.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

_STRING_STOP: Final = re.compile(r'["\\]')
_CONTAINER_STOP: Final = re.compile(r'["{}\[\]]')
_SCALAR_STOP: Final = re.compile(r"[\s,}\]]")
_BLANK: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class MemberPiece:
    """What a piece of text brought of one member's value."""

    key: str
    """As it is written, escapes included."""
    text: str
    is_last: bool
    """The value is complete."""


class _At(Enum):
    OBJECT = auto()
    """Before the opening brace."""
    KEY = auto()
    """Before a key, or the closing brace."""
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    """Before a value."""
    IN_VALUE = auto()
    COMMA = auto()
    """Behind a value."""
    END = auto()
    BROKEN = auto()


class ObjectReader:
    """Reads one object; blanks before it are skipped."""

    __slots__ = ("_at", "_depth", "_in_string", "_is_escaped", "_is_scalar", "_key")

    def __init__(self) -> None:
        self._at = _At.OBJECT
        self._key = ""
        self._depth = 0
        """Of the brackets that are open within the value."""
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False

    @property
    def has_ended(self) -> bool:
        """The closing brace has come."""
        return self._at is _At.END

    @property
    def is_broken(self) -> bool:
        """This is no JSON object."""
        return self._at is _At.BROKEN

    def read(self, text: str) -> tuple[list[MemberPiece], str]:
        """What `text` brings, and what of it stands behind the object's end, or at and behind what broke it."""
        pieces: list[MemberPiece] = []
        position = 0
        while position < len(text) and self._at not in (_At.END, _At.BROKEN):
            if self._at is _At.IN_VALUE:
                end = self._value_end(text, position)
                pieces.append(MemberPiece(self._key, text[position:end], self._at is not _At.IN_VALUE))
                position = end
            elif self._at is _At.IN_KEY:
                position = self._read_key(text, position)
            else:
                position = self._step(text[position], position)
        return pieces, text[position:]

    def _step(self, character: str, position: int) -> int:
        """Reads one character between keys and values."""
        if character in _BLANK:
            return position + 1
        match self._at, character:
            case (_At.OBJECT, "{"):
                self._at = _At.KEY
            case (_At.KEY, '"'):
                self._at, self._key, self._is_escaped = _At.IN_KEY, "", False
            case (_At.KEY | _At.COMMA, "}"):
                self._at = _At.END
            case (_At.COLON, ":"):
                self._at = _At.VALUE
            case (_At.COMMA, ","):
                self._at = _At.KEY
            case (_At.VALUE, _) if character not in ",:}]":
                self._at = _At.IN_VALUE
                self._depth, self._in_string, self._is_escaped = 0, False, False
                self._is_scalar = character not in '"{['
                return position  # the value's first character is part of it
            case _:
                self._at = _At.BROKEN
                return position
        return position + 1

    def _read_key(self, text: str, position: int) -> int:
        end = self._string_end(text, position)
        self._key += text[position:end]
        if not self._in_string:
            self._key = self._key[:-1]
            self._at = _At.COLON
        return end

    def _string_end(self, text: str, position: int) -> int:
        """Behind the quote that ends the string, or the end of the text; `_in_string` says which."""
        self._in_string = True
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            if (stop := _STRING_STOP.search(text, position)) is None:
                return len(text)
            position = stop.end()
            if stop[0] == '"':
                self._in_string = False
                return position
            self._is_escaped = True
        return position

    def _value_end(self, text: str, position: int) -> int:
        """Where the value ends, or the text; with the end of the value the state changes."""
        if self._is_scalar:
            stop = _SCALAR_STOP.search(text, position)
            if stop is None:
                return len(text)
            self._at = _At.COMMA
            return stop.start()
        while position < len(text):
            if self._in_string:
                position = self._string_end(text, position)
                if not self._in_string and self._depth == 0:
                    self._at = _At.COMMA
                    return position
                continue
            if (stop := _CONTAINER_STOP.search(text, position)) is None:
                return len(text)
            position = stop.end()
            if stop[0] == '"':
                self._in_string = True
                continue
            self._depth += 1 if stop[0] in "{[" else -1
            if self._depth == 0:
                self._at = _At.COMMA
                return position
        return position
