"""How much of an answer an event of its stream brings to a close: the `id:` lines, by which a client resumes.

An id counts tokens, not events: which tokens come in one event depends on the batching of the moment, which text
belongs to the first so many tokens does not. `12` is a stream whose only choice has shown what 12 tokens let be shown;
`40e` one whose choice has ended; `7.12e` two choices; `.u` behind it says that the usage has been sent, too. Events
before the first token (roles, echoed prompts) are counted: `h2` after the second of them.
"""

import re
from dataclasses import dataclass
from typing import Final

from services.frontend.answers.choice import ChoicePiece

MAX_ID_CHARACTERS: Final = 4096
_HEAD: Final = re.compile(r"h\d{1,4}", re.ASCII)
_EVENT_END: Final = b"\n\n"
_ID: Final = re.compile(r"\d{1,9}e?(?:\.\d{1,9}e?)*(?:\.u)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Covered:
    """What a client has of a stream, read from the last event id that it saw."""

    tokens: tuple[int, ...]
    """How many tokens of each choice the client has seen the text of, by choice index."""
    ended: tuple[bool, ...]
    usage: bool = False
    first_events: int | None = None
    """Of the events before the first token; None: all of them."""

    @classmethod
    def parse(cls, event_id: str, choices: int) -> "Covered":
        """The last event id that a client has seen. Raises ValueError for anything that is none of a stream with so
        many choices."""
        if _HEAD.fullmatch(event_id):
            return cls((0,) * choices, (False,) * choices, first_events=int(event_id[1:]))
        if len(event_id) > MAX_ID_CHARACTERS or not _ID.fullmatch(event_id):
            raise ValueError(f"{event_id[:64]!r} is no event id of a stream")
        parts = event_id.removesuffix(".u").split(".")
        if len(parts) != choices:
            raise ValueError(f"{event_id[:64]!r} is of a stream of {len(parts)} choices, not {choices}")
        return cls(
            tuple(int(part.removesuffix("e")) for part in parts),
            tuple(part.endswith("e") for part in parts),
            event_id.endswith(".u"),
        )


class EventIds:
    """Writes the ids of one stream, in the order in which its events are sent."""

    def __init__(self, choices: int) -> None:
        self._parts = ["0"] * choices

    def start(self, covered: Covered) -> None:
        """Go on behind what the client has."""
        pairs = zip(covered.tokens, covered.ended, strict=True)
        self._parts = [f"{tokens}e" if ended else str(tokens) for tokens, ended in pairs]

    def of_first_events(self, events: bytes, had: int | None) -> bytes:
        """The events before the first token, with their ids, but for those that the client has."""
        if had is None:
            return b""
        heads = events.split(_EVENT_END)[:-1]  # JSON has no line ends
        return b"".join(b"id: h%d\n%s%s" % (n, head, _EVENT_END) for n, head in enumerate(heads, 1) if n > had)

    def after(self, piece: ChoicePiece) -> bytes:
        """The `id:` line of the event that shows this piece. Call it in the order in which events are sent."""
        self._parts[piece.index] = str(piece.tokens) if piece.finish is None else f"{piece.tokens}e"
        return b"id: %s\n" % ".".join(self._parts).encode()

    def with_usage(self) -> bytes:
        """The `id:` line of the last chunk: the client has everything, the usage included."""
        return b"id: %s.u\n" % ".".join(self._parts).encode()
