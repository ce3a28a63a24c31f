"""Which token ids a model's tokenizer has: the simulated engine answers with ordinary ones of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from controlplane.model.byte_alphabet import bytes_of_characters
from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The ids below `size_tokens`, the longest run of ordinary ones among them, and the end of sequence."""

    size_tokens: int
    first_token_id: int
    last_token_id: int
    eos_token_id: int
    byte_token_ids: tuple[int, ...] = ()
    """The token of each byte, by the byte; empty where not every byte has one."""


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
    return Vocabulary(max(ids | special) + 1, first, last, eos_ids[0], _byte_token_ids(tokenizer))


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
