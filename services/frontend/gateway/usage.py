"""What an answer that passes says of its tokens. Pure."""

import json
from dataclasses import dataclass
from typing import Any, Final

MAX_TAIL_BYTES: Final = 8192
"""Of an answer's end, where the usage stands in a body as well as in the last event of a stream."""
_MARK: Final = b'"usage":'
"""A text that holds the same has its quotation marks escaped."""


@dataclass(frozen=True, slots=True)
class Usage:
    """As OpenAI's API counts it."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0


class UsageReader:
    """Keeps the end of one answer."""

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> None:
        """The next piece of the answer's body."""
        self._tail = (self._tail + piece)[-MAX_TAIL_BYTES:]

    def usage(self) -> Usage | None:
        """The last one that the answer holds; None if it holds none, such as a stream that was not asked for it."""
        end = len(self._tail)
        while (found := self._tail.rfind(_MARK, 0, end)) >= 0:
            text = self._tail[found + len(_MARK) :].decode("utf-8", "replace").lstrip()
            try:
                value, _ = json.JSONDecoder().raw_decode(text)
            except (ValueError, RecursionError):
                value = None
            if isinstance(value, dict):
                details = value.get("prompt_tokens_details")
                return Usage(
                    _count(value.get("prompt_tokens")),
                    _count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
                    _count(value.get("completion_tokens")),
                )
            end = found
        return None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value >= 0 else 0
