"""Tokenisation that does not repeat itself: prompts share long prefixes, so their pieces are remembered.

A text is cut at special tokens and, within the segments between them, into chunks at safe split points (see
`split_points`). The cuts are a function of the text from the segment's start on, so equal prefixes give equal chunks.
What is new goes to the tokenizer, all chunks of a text in one call.

Rejected: looking up word by word what is new. It was faster for text that repeats eighteen words; for 1,000 characters
of prose, code, hexadecimal digits or Chinese it took 1.5 to 2.5 times the CPU of the tokenizer itself.
"""

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from tokenizers import Tokenizer

from mesh.runtime import Threads
from services.frontend.text.split_points import SPLIT_POINT, are_safe, special_tokens

if TYPE_CHECKING:
    TokenIds: TypeAlias = array[int]
else:
    TokenIds = array
"""Numbers in one piece: as Python's integers they take nine times as much memory."""

TARGET_CHARACTERS: Final = 512
"""A chunk ends at the first split point this far from its start; half of this is tokenised anew, on average, where a
prompt leaves what was seen before."""
MAX_CHUNK_CHARACTERS: Final = 16 * TARGET_CHARACTERS
"""Longer ones (text without spaces) are not worth remembering."""

IN_PLACE_S: Final = 0.001
"""Of work that is done on the event loop: beyond it other streams would notice. A thread costs a tenth of it."""
FIRST_GUESS_S: Final = 0.4e-6
"""Per character, until it has been measured: of text in which nothing repeats itself."""
LEAST_S: Final = 0.05e-6
"""Per character: no tokenizer is faster, so what is longer than `IN_PLACE_S` allows never runs on the event loop."""
MEASURED_CHARACTERS: Final = 500
"""Of shorter texts the call is what is measured."""
MEASURED_WEIGHT: Final = 0.2

ENTRY_BYTES: Final = 240
"""Of an entry of the cache besides its text and its ids: the objects that hold them, and their place in the order."""


class Pace:
    """How long this tokenizer takes per character, as measured of late; it may be used from several threads."""

    __slots__ = ("_now_s", "s_per_character")

    def __init__(self, now_s: Callable[[], float] | None) -> None:
        """`now_s`: a monotonic clock; None: nothing is measured."""
        self._now_s = now_s
        self.s_per_character = FIRST_GUESS_S

    def fits_in_place(self, characters: int) -> bool:
        """Whether so much text may be tokenised on the event loop."""
        return characters * self.s_per_character <= IN_PLACE_S

    def measured(self, tokenise: Callable[[Sequence[str]], list[TokenIds]], texts: Sequence[str]) -> list[TokenIds]:
        """What `tokenise` gives, timed if the texts are long enough."""
        characters = sum(map(len, texts))
        if self._now_s is None or characters < MEASURED_CHARACTERS:
            return tokenise(texts)
        began_s = self._now_s()
        ids = tokenise(texts)
        now = max((self._now_s() - began_s) / characters, LEAST_S)
        self.s_per_character += MEASURED_WEIGHT * (now - self.s_per_character)
        return ids


class ChunkCache:
    """From chunk to token ids, least recently used first out; bounded by the bytes that it takes."""

    __slots__ = ("_entries", "_max_bytes", "hits", "misses", "nbytes")

    def __init__(self, max_bytes: int) -> None:
        self._entries: OrderedDict[str, TokenIds] = OrderedDict()
        self._max_bytes = max_bytes
        self.nbytes = 0
        """Of the chunks held now, with all that belongs to them."""
        self.hits = 0
        self.misses = 0

    def get(self, chunk: str) -> TokenIds | None:
        """The ids of a chunk seen before."""
        ids = self._entries.get(chunk)
        if ids is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(chunk)
        return ids

    def put(self, chunk: str, ids: TokenIds) -> None:
        """Remember a chunk's ids; the chunks that were not used for longest are forgotten to make room."""
        if chunk in self._entries:
            return
        self._entries[chunk] = ids
        self.nbytes += _entry_bytes(chunk, ids)
        while self.nbytes > self._max_bytes:
            self.nbytes -= _entry_bytes(*self._entries.popitem(last=False))


def _entry_bytes(chunk: str, ids: TokenIds) -> int:
    return ENTRY_BYTES + sys.getsizeof(chunk) + len(ids) * ids.itemsize


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A text in chunks, with the ids of those that were seen before."""

    chunks: list[str]
    known: list[TokenIds | None]
    unseen: list[str]
    """The chunks whose ids are not known, each once."""

    @property
    def unseen_characters(self) -> int:
        """What is left to tokenise: the cost of it."""
        return sum(map(len, self.unseen))


class ChunkedTokenizer:
    """`encode` gives exactly `tokenizer.encode(text, add_special_tokens=False).ids`."""

    def __init__(self, tokenizer: Tokenizer, cache_bytes: int, now_s: Callable[[], float] | None = None) -> None:
        """`now_s`: a monotonic clock, by which it is found out what may be done on the event loop."""
        self._tokenizer = tokenizer
        self._cache = ChunkCache(cache_bytes)
        self._pace = Pace(now_s)
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
        if self._pace.fits_in_place(found.unseen_characters):
            return self.complete(found, self.tokenise(found.unseen))
        return self.complete(found, await threads.run(self.tokenise, found.unseen))

    def look_up(self, text: str) -> LookedUp:
        """What is known of `text` and what is left to do; cheap. `tokenise` the rest, then `complete`."""
        chunks = self.chunks(text) if self.chunked else [text]
        known = [self._cache.get(chunk) for chunk in chunks]
        unseen = dict.fromkeys(chunk for chunk, ids in zip(chunks, known, strict=True) if ids is None)
        return LookedUp(chunks, known, list(unseen))

    def tokenise(self, chunks: Sequence[str]) -> list[TokenIds]:
        """The ids of each chunk. May run in a thread."""
        return self._pace.measured(self._tokenise, chunks)

    def complete(self, found: LookedUp, tokenised: list[TokenIds]) -> list[int]:
        """The ids of the text that was looked up, given those of its unseen chunks."""
        fresh = dict(zip(found.unseen, tokenised, strict=True))
        for chunk, ids in fresh.items():
            if len(chunk) <= MAX_CHUNK_CHARACTERS:
                self._cache.put(chunk, ids)
        result: list[int] = []
        for chunk, known in zip(found.chunks, found.known, strict=True):
            result += fresh[chunk] if known is None else known
        return result

    def _tokenise(self, chunks: Sequence[str]) -> list[TokenIds]:
        encodings = self._tokenizer.encode_batch_fast(list(chunks), add_special_tokens=False)
        return [array("I", encoding.ids) for encoding in encodings]

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
