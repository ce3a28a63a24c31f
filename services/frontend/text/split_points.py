"""Where a text may be cut so that the pieces' token ids, in a row, are those of the whole.

Merges never cross what the pre-tokenizer's regular expression separates, so a safe cut is one that the expression is
bound to make as well, whatever stands around it. This one is:

    no blank | one space + no blank

In the expressions of GPT-2, Llama 3, Qwen and their kin no alternative that has consumed a character other than a
blank goes on over a space, so a match ends before the space; and none looks behind, so what comes next is matched as
if the text began there. Special tokens are safe cuts in every tokenizer.
"""

import json
import re
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

# The space comes first so that the search for it is a memchr. Python's \s holds every blank that the tokenizers' \s
# holds, and four control characters more, at which there is merely no cut.
SPLIT_POINT = re.compile(r" (?<=\S )(?=\S)")

_SAMPLES = (
    "",
    " ",
    "The quick  brown fox\n\n jumps over 12345 lazy dogs, doesn't it? I'll say we've 3.14 reasons.\r\n\tEnd ",
    "def f(x):\n    return x ** 2  # squared\n\n\nclass A:\n\tpass\n" * 3,
    "Ünïcödé straße Привет мир αβγ 你好 世界 こんにちは 안녕 하세요 مرحبا بالعالم 🙂🙃 e\u0301 a \u0301b",
    "a b c d e f g h 1 2 3 44 555 6666 A B CC DDD 's 't x's y't O'Re 'LL we'd ' '' ''' x' 'y",
    "trailing spaces   \u00a0nbsp \u3000wide\u2028line x1 2y _a b_ c-d e/f (g h) [i] {j k} <l m> ; n : o\x1c p \x85 q",
)


def cut(text: str) -> list[str]:
    """`text` at every split point; joined it is `text` again."""
    starts = [0, *(match.start() for match in SPLIT_POINT.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(starts) if start < end]


def special_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Matches the added tokens as the tokenizer finds them (leftmost, longest); None if some are found in another way
    (blanks around them swallowed, whole words only, after normalisation) or a split point may lie inside one."""
    added = [
        token
        for token in tokenizer.get_added_tokens_decoder().values()
        if not (token.special and tokenizer.encode_special_tokens)
    ]
    if any(token.lstrip or token.rstrip or token.single_word or token.normalized for token in added):
        return None
    contents = sorted((token.content for token in added), key=len, reverse=True)
    if any(SPLIT_POINT.search(content) for content in contents):
        return None
    return re.compile("|".join(map(re.escape, contents)) if contents else r"(?!)")


def are_safe(tokenizer: Tokenizer) -> bool:
    """Whether the split points are safe for this tokenizer: known by its structure, and confirmed on samples."""
    if special_tokens(tokenizer) is None or not _cuts_at_spaces(tokenizer):
        return False
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()][:8]
    marked = "".join(f"{a} hello world{b}" for a, b in zip(added, reversed(added), strict=True))
    return all(_agree(tokenizer, sample) for sample in (*_SAMPLES, marked))


def _agree(tokenizer: Tokenizer, sample: str) -> bool:
    pieces = tokenizer.encode_batch_fast(cut(sample), add_special_tokens=False)
    whole = tokenizer.encode_batch_fast([sample], add_special_tokens=False)[0].ids
    return [token_id for piece in pieces for token_id in piece.ids] == whole


_SAFE_NORMALIZERS = (None, "NFC")
# NFC never composes across a space.


def _cuts_at_spaces(tokenizer: Tokenizer) -> bool:
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


_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTION = r"(?:\(\?i:[^()]*'ll\S*?\)\?)?"
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
    # GPT-4o (o200k), gpt-oss, Llama 4, Mistral's tekken: letters by their case, with or without contractions behind.
    re.compile(
        re.escape(_LETTERS + r"*" + _SMALL + r"+")
        + _CONTRACTION
        + re.escape("|" + _LETTERS + r"+" + _SMALL + r"*")
        + _CONTRACTION
        + re.escape(r"|\p{N}")
        + r"(?:\{1,\d\})?"
        + re.escape(r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    ),
)


def _is_known(split: dict[str, Any]) -> bool:
    regex = split["pattern"].get("Regex", "")
    isolated = split["behavior"] == "Isolated" and not split["invert"]
    return isolated and any(known.fullmatch(regex) for known in _KNOWN_EXPRESSIONS)
