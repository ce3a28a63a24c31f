"""Tokenisation that does not repeat itself: prompts share long prefixes, so their pieces are remembered.

A text is cut at special tokens and, within the segments between them, into chunks at borders that the
pre-tokenizer's regular expression is bound to cut at as well. Since merges never cross such a border, the ids
of the whole are the ids of the chunks in a row. The cuts are a function of the text from the segment's start
on, so equal prefixes give equal chunks.

The border used is `alphanumeric | one space + alphanumeric`. In the expressions of GPT-2, Llama 3, Qwen and
their kin no alternative that has consumed a non-space character goes on over a space, and none looks behind;
so a match ends before that space whatever stands further left, and the next one starts there.
"""

import json
import re
from collections import OrderedDict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

TARGET_CHARACTERS = 512
"""A chunk ends at the first border this far from its start. Half of this is tokenised anew, on average, where a
prompt leaves what was seen before; shorter chunks cost more look-ups (measured: 512 is flat within 10 %)."""
MAX_CHUNK_CHARACTERS = 16 * TARGET_CHARACTERS
"""Longer ones (text without spaces) are not worth remembering."""

_BORDER = re.compile(r"(?<=[^\W_]) (?=[^\W_])")
_MULTI_WORD = re.compile(r"[^\W_] [^\W_]")

_SAMPLES = (
    "",
    " ",
    "The quick  brown fox\n\n jumps over 12345 lazy dogs, doesn't it? I'll say we've 3.14 reasons.\r\n\tEnd ",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n" * 3,
    "Ünïcödé straße Привет мир αβγ 你好 世界 こんにちは 안녕 하세요 مرحبا بالعالم 🙂🙃 e\u0301 a \u0301b",
    "a b c d e f g h 1 2 3 44 555 6666 A B CC DDD 's 't x's y't O'Re 'LL we'd",
    "trailing spaces   \u00a0nbsp \u3000wide\u2028line x1 2y _a b_ c-d e/f (g h) [i] {j k} <l m> ; n : o",
)


class ChunkCache:
    """From chunk to token ids, least recently used first out; bounded by the characters it holds."""

    __slots__ = ("_entries", "_max_characters", "characters", "hits", "misses")

    def __init__(self, max_characters: int) -> None:
        self._entries: OrderedDict[str, list[int]] = OrderedDict()
        self._max_characters = max_characters
        self.characters = 0
        """Held now."""
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
        """Remember a chunk's ids."""
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
    """Those without, each once."""

    @property
    def unseen_characters(self) -> int:
        """What is left to tokenise: the cost of it."""
        return sum(map(len, self.unseen))


class ChunkedTokenizer:
    """`encode` gives exactly `tokenizer.encode(text, add_special_tokens=False).ids`."""

    def __init__(self, tokenizer: Tokenizer, cache_characters: int) -> None:
        self._tokenizer = tokenizer
        self._cache = ChunkCache(cache_characters)
        self._special = _special_token_pattern(tokenizer)
        self.chunked = self._special is not None and cuts_at_spaces(tokenizer) and self._agrees_on_samples()
        """False: this tokenizer's borders are not known to be safe, so every text is tokenised as a whole."""

    @property
    def cache(self) -> ChunkCache:
        """What was seen before, with its counters."""
        return self._cache

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; special tokens that it spells out become theirs."""
        found = self.look_up(text)
        return self.complete(found, self.tokenise(found.unseen))

    def look_up(self, text: str) -> "LookedUp":
        """What is known of `text` and what is left to do; cheap. `tokenise` the rest, then `complete`."""
        chunks = self.chunks(text) if self.chunked else [text]
        known = [self._cache.get(chunk) for chunk in chunks]
        unseen = dict.fromkeys(chunk for chunk, ids in zip(chunks, known, strict=True) if ids is None)
        return LookedUp(chunks, known, list(unseen))

    def tokenise(self, chunks: list[str]) -> list[list[int]]:
        """The ids of each chunk. Touches no state and leaves the interpreter lock, so it may run in a thread."""
        if not chunks:
            return []
        encodings = self._tokenizer.encode_batch_fast(chunks, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def complete(self, found: "LookedUp", tokenised: list[list[int]]) -> list[int]:
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
        """`text` cut at special tokens and safe borders; joined they are `text` again."""
        chunks: list[str] = []
        start = 0
        if self._special is not None:
            for match in self._special.finditer(text):
                _cut_segment(text, start, match.start(), chunks)
                chunks.append(match.group())
                start = match.end()
        _cut_segment(text, start, len(text), chunks)
        return chunks

    def _agrees_on_samples(self) -> bool:
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()][:8]
        samples = [*_SAMPLES, "".join(f"{a} hello world{b}" for a, b in zip(added, reversed(added), strict=True))]
        return all(self._agrees(sample) for sample in samples)

    def _agrees(self, sample: str) -> bool:
        """Cut at every border, not only every so often."""
        pieces = [piece for chunk in self.chunks(sample) for piece in _cut_everywhere(chunk)]
        return [token_id for ids in self.tokenise(pieces) for token_id in ids] == self.tokenise([sample])[0]


def _cut_segment(text: str, start: int, end: int, chunks: list[str]) -> None:
    while end - start > TARGET_CHARACTERS:
        border = _BORDER.search(text, start + TARGET_CHARACTERS, end)
        if border is None:
            break
        chunks.append(text[start : border.start()])
        start = border.start()
    if start < end:
        chunks.append(text[start:end])


def _cut_everywhere(text: str) -> list[str]:
    starts = [0, *(match.start() for match in _BORDER.finditer(text)), len(text)]
    return [text[a:b] for a, b in pairwise(starts) if a < b]


def _special_token_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens the way the tokenizer finds them (leftmost, longest); None if some of them are
    found in another way (blanks around them swallowed, whole words only, after normalisation)."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None
    contents = sorted((token.content for token in added), key=len, reverse=True)
    if any(_MULTI_WORD.search(content) for content in contents):
        return None
    return re.compile("|".join(map(re.escape, contents))) if contents else re.compile(r"(?!)")


_SAFE_NORMALIZERS = (None, "NFC")
"""NFC never composes across a space."""


def cuts_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the pre-tokenizer is byte-level with one of the expressions that the module's docstring is about."""
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    normalizer, pre_tokenizer = description["normalizer"], description["pre_tokenizer"]
    if description["model"]["type"] != "BPE" or description.get("truncation") or description.get("padding"):
        return False
    if (normalizer and normalizer["type"]) not in _SAFE_NORMALIZERS or pre_tokenizer is None:
        return False
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    return _is_byte_level(steps[-1]) and _cuts(steps)


def _is_byte_level(step: dict[str, Any]) -> bool:
    return step["type"] == "ByteLevel" and not step["add_prefix_space"]


def _cuts(steps: list[dict[str, Any]]) -> bool:
    """What stands before the byte level only cuts: around digits, which is a matter of single characters, or by
    one known expression."""
    before = [step for step in steps[:-1] if step["type"] != "Digits"]
    if not before:
        return bool(steps[-1]["use_regex"])
    return len(before) == 1 and before[0]["type"] == "Split" and _is_known(before[0])


_KNOWN_EXPRESSIONS = (
    # GPT-2.
    re.compile(re.escape(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")),
    # GPT-4 (cl100k), Llama 3, Qwen 2 and 3: contractions | letters | digits | signs | blanks.
    re.compile(
        r"\((?:\?i)?:[^()]*'ll\S*?\)\|"
        + re.escape(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}")
        + r"(?:\{1,\d\}|\+)?"
        + re.escape(r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    ),
)


def _is_known(split: dict[str, Any]) -> bool:
    regex = split["pattern"].get("Regex", "")
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return isolated and any(known.fullmatch(regex) for known in _KNOWN_EXPRESSIONS)
