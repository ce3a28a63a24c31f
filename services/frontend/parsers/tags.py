"""Tags in a text that comes in pieces."""

import re
from collections.abc import Sequence
from functools import lru_cache


class TagReader:
    """Finds the next of some tags, and holds back what may be the beginning of one."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def read(self, text: str, tags: tuple[str, ...]) -> tuple[str, str | None, str]:
        """The text up to the first of the tags, that tag (None: there is none yet), and what stands behind it. Read
        what stands behind before anything else: nothing of it is kept."""
        text = self._held + text
        if (found := _pattern(tags).search(text)) is not None:
            self._held = ""
            return text[: found.start()], found[0], text[found.end() :]
        held = undecided(text, tags)
        self._held = text[len(text) - held :]
        return text[: len(text) - held], None, ""

    def rest(self) -> str:
        """What is held back, which turned out to be no tag."""
        held, self._held = self._held, ""
        return held


def undecided(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    longest = max(map(len, tags)) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        tail = text[start:]
        if any(tag.startswith(tail) for tag in tags):
            return len(text) - start
    return 0


@lru_cache(maxsize=64)
def _pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    """Of two that begin at the same place the longer one."""
    return re.compile("|".join(re.escape(tag) for tag in sorted(tags, key=len, reverse=True)))
