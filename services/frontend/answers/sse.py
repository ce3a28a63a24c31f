"""Server-sent events, cheap: what surrounds a chunk's text is encoded once per request."""

from collections.abc import Callable
from typing import Final

import msgspec

from services.frontend.answers.schema import ChatCompletionChunk, Completion

encode = msgspec.json.Encoder().encode

DONE_EVENT: Final = b"data: [DONE]\n\n"
_START: Final = b"data: "
_END: Final = b"\n\n"
_NO_CHOICES: Final = b'"choices":[]'
_NO_TEXT: Final = b':""'


def event(body: bytes) -> bytes:
    """One event holding a JSON text."""
    return _START + body + _END


def comment(text: str) -> bytes:
    """An event that readers skip."""
    return b": " + text.replace("\n", " ").encode() + _END


class ChunkEnvelope:
    """The parts of a chunk before and after its one choice, and those of a plain choice before and after its text."""

    __slots__ = ("_before", "_heads", "_plain_tail", "_tail")

    def __init__(
        self, chunk: ChatCompletionChunk | Completion, choices: int, plain: Callable[[int], msgspec.Struct]
    ) -> None:
        """`chunk` is one without choices; `plain` a choice that brings nothing but text, with an empty one."""
        before, _, after = encode(chunk).partition(_NO_CHOICES)
        self._before = _START + before + b'"choices":['
        self._tail = b"]" + after + _END
        self._heads: list[bytes] = []
        self._plain_tail = b""
        for index in range(choices):
            head, _, tail = encode(plain(index)).partition(_NO_TEXT)
            self._heads.append(self._before + head + _NO_TEXT[:-2])
            self._plain_tail = tail + self._tail

    def text_event(self, index: int, text: str) -> bytes:
        """A chunk that brings nothing but text: the hot path."""
        return self._heads[index] + encode(text) + self._plain_tail

    def choice_event(self, choice: msgspec.Struct) -> bytes:
        """A chunk with logprobs, a role or a finish reason."""
        return self._before + encode(choice) + self._tail
