"""From token ids back to text, a few tokens at a time and never half a character.

A multi-byte character may be spread over several tokens; what is not yet a whole character is held back. Nothing is
shown of one that an answer ends in, as `max_tokens` may have it: clients of vLLM get no U+FFFD there either.
`ByteLevelDetokenizer` is exact and costs about a microsecond a token; `WindowDetokenizer` works with any
tokenizer by decoding a short window twice, the way text-generation-inference does it.
"""

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from controlplane.model.byte_alphabet import bytes_of_characters

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 16
"""A character spans at most four bytes, so more tokens than this without one are not UTF-8 at all."""
CONTEXT_TOKENS = 5
"""How much of the prompt the window sees first: some decoders treat the first token specially."""


def token_bytes(token: str) -> bytes:
    """The bytes that a vocabulary entry stands for; an added token, not spelled in the alphabet, is itself."""
    mapping = bytes_of_characters()
    try:
        return bytes([mapping[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


class Detokenizer(Protocol):
    """Turns one answer's tokens into text as they come. Keeps state: use one per answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""

    def finish(self) -> str:
        """What was held back, but for what never became a character."""


class ByteLevelDetokenizer:
    """For byte-level vocabularies: every token is a fixed run of bytes."""

    __slots__ = ("_bytes_of_token", "_decode", "_held")

    def __init__(self, bytes_of_token: Sequence[bytes]) -> None:
        """`bytes_of_token` is indexed by token id; special tokens are empty."""
        self._bytes_of_token = bytes_of_token
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._held = ""
        """U+FFFD for bytes that are no character, until more text comes."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; ids beyond the vocabulary (padding rows) have no text."""
        known, size = self._bytes_of_token, len(self._bytes_of_token)
        if len(token_ids) == 1:
            token_id = token_ids[0]
            text = self._decode(known[token_id]) if token_id < size else ""
        else:
            text = self._decode(b"".join([known[token_id] for token_id in token_ids if token_id < size]))
        return self._hold(text) if self._held or text.endswith(REPLACEMENT) else text

    def finish(self) -> str:
        """Nothing: what was held back never became a character."""
        return ""

    def _hold(self, text: str) -> str:
        whole = self._held + text
        shown = whole.rstrip(REPLACEMENT)
        self._held = whole[len(shown) :]
        return shown


class WindowDetokenizer:
    """For any tokenizer: the new text is what a window's text has more than that of all but its new tokens."""

    __slots__ = ("_decode", "_prefix_tokens", "_window")

    def __init__(self, decode: Callable[[list[int]], str], context_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context_token_ids[-CONTEXT_TOKENS:])
        self._prefix_tokens = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._push_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        """What was held back, but for what never became a character."""
        return self._advance(self._decode(self._window)).rstrip(REPLACEMENT)

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(REPLACEMENT)
        if unfinished and len(self._window) - self._prefix_tokens < MAX_PENDING_TOKENS:
            return ""
        return self._advance(text)

    def _advance(self, text: str) -> str:
        known = self._decode(self._window[: self._prefix_tokens])
        if len(text) <= len(known):  # nothing visible, such as a special token: the window goes on growing
            if len(self._window) > 2 * MAX_PENDING_TOKENS:
                self._shrink()
            return ""
        self._shrink()
        return text[len(known) :]

    def _shrink(self) -> None:
        self._window = self._window[self._prefix_tokens :][-MAX_PENDING_TOKENS:]
        self._prefix_tokens = len(self._window)
