"""Tokenisation that does not repeat itself: prompts share long prefixes, so their pieces are remembered.

A text is cut at special tokens and, within the segments between them, into chunks at safe split points (see
`split_points`). The cuts are a function of the text from the segment's start on, so equal prefixes give equal chunks.
What is new is tokenised word by word (see `words`).
"""

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from mesh.runtime import Threads
from services.frontend.text.split_points import SPLIT_POINT, are_safe, special_tokens
from services.frontend.text.words import WordTokenizer

TARGET_CHARACTERS: Final = 512
"""A chunk ends at the first split point this far from its start; half of this is tokenised anew, on average, where a
prompt leaves what was seen before."""
MAX_CHUNK_CHARACTERS: Final = 16 * TARGET_CHARACTERS
"""Longer ones (text without spaces) are not worth remembering."""


IN_PLACE_CHARACTERS: Final = 16_384
"""About 2 ms of tokenisation: beyond it other streams would notice."""


class ChunkCache:
    """From chunk to token ids, least recently used first out; bounded by the characters it holds."""

    __slots__ = ("_entries", "_max_characters", "characters", "hits", "misses")

    def __init__(self, max_characters: int) -> None:
        self._entries: OrderedDict[str, list[int]] = OrderedDict()
        self._max_characters = max_characters
        self.characters = 0
        """Characters of the chunks held now."""
        self.hits = 0
        self.misses = 0

    def get(self, chunk: str) -> list[int] | None:
        """The ids of a chunk seen before."""
        ids = self._entries.get(chunk)
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(chunk)
        return ids

    def put(self, chunk: str, ids: list[int]) -> None:
        """Remember a chunk's ids; the chunks that were not used for longest are forgotten to make room."""
        if chunk in self._entries:
            return
        self._entries[chunk] = ids
        self.characters += len(chunk)
        while self.characters > self._max_characters:
            evicted, _ = self._entries.popitem(last=False)
            self.characters -= len(evicted)


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A text in chunks, with the ids of those that were seen before."""

    chunks: list[str]
    known: list[list[int] | None]
    unseen: list[str]
    """The chunks whose ids are not known, each once."""

    @property
    def unseen_characters(self) -> int:
        """What is left to tokenise: the cost of it."""
        return sum(map(len, self.unseen))


class ChunkedTokenizer:
    """`encode` gives exactly `tokenizer.encode(text, add_special_tokens=False).ids`."""

    def __init__(self, tokenizer: Tokenizer, cache_characters: int) -> None:
        self._tokenizer = tokenizer
        self._cache = ChunkCache(cache_characters)
        self._words = WordTokenizer(tokenizer)
        safe = are_safe(tokenizer)
        self._special: re.Pattern[str] | None = special_tokens(tokenizer) if safe else None
        self.chunked = safe
        """False: this tokenizer's split points are not known to be safe, so every text is tokenised as a whole."""

    @property
    def cache(self) -> ChunkCache:
        """What was seen before, with its counters."""
        return self._cache

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens that it spells out become theirs."""
        found = self.look_up(text)
        return self.complete(found, self.tokenise(found.unseen))

    async def encode_in(self, threads: Threads, text: str) -> list[int]:
        """The same on the event loop: little work is done in place, much of it in a thread."""
        found = self.look_up(text)
        if found.unseen_characters <= IN_PLACE_CHARACTERS:
            return self.complete(found, self.tokenise(found.unseen))
        return self.complete(found, await threads.run(self.tokenise, found.unseen))

    def look_up(self, text: str) -> LookedUp:
        """What is known of `text` and what is left to do; cheap. `tokenise` the rest, then `complete`."""
        chunks = self.chunks(text) if self.chunked else [text]
        known = [self._cache.get(chunk) for chunk in chunks]
        unseen = dict.fromkeys(chunk for chunk, ids in zip(chunks, known, strict=True) if ids is None)
        return LookedUp(chunks, known, list(unseen))

    def tokenise(self, chunks: list[str]) -> list[list[int]]:
        """The ids of each chunk. May run in a thread."""
        if self.chunked:
            return [self._words.encode(chunk) for chunk in chunks]
        encodings = self._tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def complete(self, found: LookedUp, tokenised: list[list[int]]) -> list[int]:
        """The ids of the text that was looked up, given those of its unseen chunks."""
        fresh = dict(zip(found.unseen, tokenised, strict=True))
        for chunk, ids in fresh.items():
            if len(chunk) <= MAX_CHUNK_CHARACTERS:
                self._cache.put(chunk, ids)
        result: list[int] = []
        for chunk, known in zip(found.chunks, found.known, strict=True):
            result += fresh[chunk] if known is None else known
        return result

    def chunks(self, text: str) -> list[str]:
        """`text` cut at special tokens and safe split points; joined they are `text` again."""
        chunks: list[str] = []
        start = 0
        if self._special is not None:
            for match in self._special.finditer(text):
                _cut_segment(text, start, match.start(), chunks)
                chunks.append(match.group())
                start = match.end()
        _cut_segment(text, start, len(text), chunks)
        return chunks


def _cut_segment(text: str, start: int, end: int, chunks: list[str]) -> None:
    while end - start > TARGET_CHARACTERS:
        split_point = SPLIT_POINT.search(text, start + TARGET_CHARACTERS, end)
        if split_point is None:
            break
        chunks.append(text[start : split_point.start()])
        start = split_point.start()
    if start < end:
        chunks.append(text[start:end])
