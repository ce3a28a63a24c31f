"""One call of a tool that is written as a JSON object: {"name": ..., "arguments": {...}}."""

import json

from services.frontend.parsers.deltas import DeltaBuilder
from services.frontend.parsers.json_members import MemberPiece, ObjectReader

MAX_NAME_CHARACTERS = 256


class JsonCall:
    """Tells of the call as soon as its name is known, and then of its arguments as they come."""

    __slots__ = ("_arguments_keys", "_early", "_index", "_name", "_raw", "_reader", "has_begun")

    def __init__(self, index: int, arguments_keys: tuple[str, ...]) -> None:
        self._index = index
        self._arguments_keys = arguments_keys
        self._reader = ObjectReader()
        self._name = ""
        self._early: list[str] = []
        """Arguments that came before the name."""
        self._raw: list[str] = []
        """All that was read before the call began, should it turn out to be none."""
        self.has_begun = False
        """The client was told of it."""

    @property
    def has_ended(self) -> bool:
        """The object is complete."""
        return self._reader.has_ended

    @property
    def is_broken(self) -> bool:
        """This is no JSON object."""
        return self._reader.is_broken

    def read(self, text: str, to: DeltaBuilder) -> str:
        """Tells `to` what the text brings; returns what stands behind the object's end, or where it is broken."""
        pieces, rest = self._reader.read(text)
        if not self.has_begun:
            self._raw.append(text[: len(text) - len(rest)])
        for piece in pieces:
            self._take(piece, to)
        return rest

    def taken_back(self) -> str:
        """The text of what turned out to be no call."""
        raw, self._raw = "".join(self._raw), []
        return raw

    def _take(self, piece: MemberPiece, to: DeltaBuilder) -> None:
        if piece.key in self._arguments_keys:
            if self.has_begun:
                to.call(self._index, arguments=piece.text)
            else:
                self._early.append(piece.text)
        elif piece.key == "name" and not self.has_begun and len(self._name) <= MAX_NAME_CHARACTERS:
            self._name += piece.text
            if piece.is_last and (name := _string(self._name)):
                to.call(self._index, name, "".join(self._early))
                self.has_begun, self._early, self._raw = True, [], []


def _string(text: str) -> str | None:
    """The value of a JSON string; None for any other JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
