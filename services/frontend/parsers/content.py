"""Text beside calls of tools."""

from services.frontend.parsers.deltas import DeltaBuilder


class ContentGate:
    """Lets text through, but for blanks that only set off a call: those before the first word and between calls."""

    __slots__ = ("_blanks", "_is_open")

    def __init__(self) -> None:
        self._blanks = ""
        self._is_open = False

    def say(self, text: str, to: DeltaBuilder) -> None:
        """Text that is part of the content."""
        if not self._is_open:
            text = self._blanks + text
            if not text.strip():
                self._blanks = text
                return
            self._blanks, self._is_open = "", True
        to.say(text)

    def call(self) -> None:
        """A call begins: blanks before it are dropped, and those behind it wait for words."""
        self._blanks, self._is_open = "", False

    def finish(self, to: DeltaBuilder, *, had_calls: bool) -> None:
        """Blanks are all that there is: content, unless there were calls."""
        if not had_calls:
            to.say(self._blanks)
        self._blanks = ""
