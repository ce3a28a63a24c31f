"""Stop strings: an answer ends where one of them would begin, wherever one token ends and the next begins."""

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as it cannot be the beginning of a stop string any more; one per answer.

    Of several stop strings the one that is complete first ends the answer, of those complete at once the longest:
    a rule that does not depend on how the text was cut into pieces.
    """

    __slots__ = ("_held", "_is_shown", "_longest", "_stops", "found", "stopped")

    def __init__(self, stops: Sequence[str], *, is_shown: bool = False) -> None:
        """`is_shown`: the stop string is part of the answer that it ends."""
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._is_shown = is_shown
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False
        """True once a stop string has appeared; nothing more will come out."""
        self.found: str | None = None
        """The one that has appeared."""

    @property
    def watches(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is now decided to be part of the answer. Without `may_stop` a stop string that `text` completes
        is text as any other; one that begins in it may still end the answer."""
        if not self._stops:
            return text
        if self.stopped or not text:
            return ""
        candidate = self._held + text
        end = self._first_stop(candidate) if may_stop else None
        if end is not None:
            self.stopped = True
            self._held = ""
            return candidate[:end]
        held_from = self._undecided_from(candidate)
        self._held = candidate[held_from:]
        return candidate[:held_from]

    def finish(self) -> str:
        """What was held back: the answer is over, so it is not the beginning of a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the answer ends, by the stop string that is complete first."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        complete, begins = min(found)
        self.found = text[begins:complete]
        return complete if self._is_shown else begins

    def _undecided_from(self, text: str) -> int:
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(text)
