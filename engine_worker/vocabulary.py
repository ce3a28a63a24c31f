"""Which token ids a model's tokenizer has: the simulated engine answers with ordinary ones of them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from controlplane.model.byte_alphabet import bytes_of_characters
from controlplane.model.media import MODALITIES
from mesh.errors import ConfigurationError

FEWEST_WORDS: Final = 20
MOST_WORDS: Final = 1000
_WORD: Final = re.compile("[Ġ▁][a-z]{3,}")
"""Byte-level BPE writes the blank before a word as Ġ, SentencePiece as U+2581."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids below `size_tokens`, the longest run of ordinary ones among them, and the end of sequence."""

    size_tokens: int
    first_token_id: int
    last_token_id: int
    eos_token_id: int
    byte_token_ids: tuple[int, ...] = ()
    """The token of each byte, by the byte; empty where not every byte has one."""
    media_tokens: tuple[tuple[str, int], ...] = ()
    """Modalities that have a placeholder of their own, `<image>`, `<audio>` or `<video>`, and its token."""
    word_token_ids: tuple[int, ...] = ()
    """Of ordinary tokens, those that are a word with the blank before it; empty where there are few."""


def read_vocabulary(model_path: Path) -> Vocabulary | None:
    """The vocabulary of a model in Hugging Face format; None if the directory has no tokenizer.json. Raises
    ConfigurationError for files that cannot be understood."""
    tokenizer_path = model_path / "tokenizer.json"
    if not tokenizer_path.exists():
        return None
    try:
        tokenizer = msgspec.json.decode(tokenizer_path.read_bytes())
        generation = msgspec.json.decode((model_path / "generation_config.json").read_bytes())
        return _vocabulary(tokenizer, generation["eos_token_id"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the vocabulary of {model_path} cannot be read ({error!r}); tokenizer.json and a generation_config.json "
            "with eos_token_id are needed"
        ) from error


def _vocabulary(tokenizer: dict[str, Any], eos: int | list[int]) -> Vocabulary:
    added = tokenizer["added_tokens"]
    vocabulary = tokenizer["model"]["vocab"]
    # BPE and WordPiece map tokens to ids; Unigram lists (token, score) in the order of ids.
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    special = {token["id"] for token in added}
    eos_ids = eos if isinstance(eos, list) else [eos]
    first, last = _longest_run(ids - special - set(eos_ids))
    words = tuple(token_id for token_id in _word_token_ids(vocabulary) if token_id not in special)
    return Vocabulary(
        max(ids | special) + 1, first, last, eos_ids[0], _byte_token_ids(tokenizer), _media_tokens(added), words
    )


def _word_token_ids(vocabulary: dict[str, int] | list[list[Any]]) -> tuple[int, ...]:
    """The first ones by their ids, which trainers give to the most frequent ones."""
    pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((row[0], at) for at, row in enumerate(vocabulary))
    words = sorted(token_id for text, token_id in pairs if _WORD.fullmatch(text))[:MOST_WORDS]
    return tuple(words) if len(words) >= FEWEST_WORDS else ()


def _media_tokens(added: list[dict[str, Any]]) -> tuple[tuple[str, int], ...]:
    ids = {token.get("content"): token["id"] for token in added}
    return tuple((modality, ids[f"<{modality}>"]) for modality in MODALITIES if f"<{modality}>" in ids)


def _byte_token_ids(tokenizer: dict[str, Any]) -> tuple[int, ...]:
    vocabulary = tokenizer["model"]["vocab"]
    if (tokenizer.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(vocabulary, dict):
        return ()
    characters = {byte: character for character, byte in bytes_of_characters().items()}
    ids = [vocabulary[characters[byte]] for byte in range(256) if characters[byte] in vocabulary]
    return tuple(ids) if len(ids) == 256 else ()


def _longest_run(ids: set[int]) -> tuple[int, int]:
    """First and last of the longest run of consecutive ids."""
    best = (0, -1)
    first = last = -1
    for token_id in sorted(ids):
        first = token_id if token_id != last + 1 or first < 0 else first
        last = token_id
        if last - first > best[1] - best[0]:
            best = (first, last)
    if best[1] < best[0]:
        raise ValueError("no ordinary tokens")
    return best
