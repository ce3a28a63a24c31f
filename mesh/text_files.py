"""The files of a checkpoint that turn text into tokens and back: all that a frontend needs of a model.

Workers announce a hash of them and hand them out, so that frontends need no checkpoint.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from mesh.errors import ConfigurationError

TEXT_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "config.json",
    "config_sentence_transformers.json",
)
TEKKEN: Final = "tekken.json"
"""Mistral's own format. It is handed out where that company's library makes a model's prompts."""
GIVEN_FILES: Final = (*TEXT_FILES, TEKKEN)
"""All that a worker may hand out."""
MAX_TEXT_BYTES: Final = 128 * 1024 * 1024
"""Of all of them together; the largest tokenizers in use (262k tokens) have 33 MiB."""
PIECE_BYTES: Final = 1024 * 1024
_TOKENIZERS: Final = (
    *("tokenizer.json", "tokenizer.model", "tokenizer.model.v*", "tokenizer_config.json", TEKKEN),
    *("tiktoken.model", "*.tiktoken", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
)
"""Files of tokenizers, in any format that vLLM reads."""

TextFiles = Mapping[str, bytes]
"""Contents by name; what a checkpoint does not have is not there."""


class _TokenizerConfig(msgspec.Struct):
    chat_template: Any = None


def read_text_files(directory: Path) -> TextFiles:
    """Those that there are; blocks. Raises ConfigurationError for more than `MAX_TEXT_BYTES`, and for what cannot be
    read."""
    files: dict[str, bytes] = {}
    left_bytes = MAX_TEXT_BYTES
    try:
        for name in TEXT_FILES:
            path = directory / name
            if not path.is_file():
                continue
            left_bytes -= path.stat().st_size
            if left_bytes < 0:
                raise ConfigurationError(f"{directory}: its tokenizer and templates have over {MAX_TEXT_BYTES} bytes")
            files[name] = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be read: {error}") from error
    return files


def has_tokenizer(directory: Path) -> bool:
    """Whether a tokenizer of any format lies in a checkpoint."""
    return any(True for pattern in _TOKENIZERS for _ in directory.glob(pattern))


def has_chat_template(files: TextFiles) -> bool:
    """Whether they say how a chat becomes a prompt."""
    if any(name in files for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return bool(msgspec.json.decode(files.get("tokenizer_config.json", b"{}"), type=_TokenizerConfig).chat_template)
    except msgspec.MsgspecError:
        return False


def text_hash(files: TextFiles) -> str:
    """64 hexadecimal digits over names and contents; empty where there is nothing."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}:{len(files[name])}:".encode())
        digest.update(files[name])
    return digest.hexdigest()


def pieces(files: TextFiles) -> Iterator[tuple[str, bytes]]:
    """Name and content in pieces of at most `PIECE_BYTES`, those of a file in order; at least one for each file."""
    for name, content in files.items():
        for start in range(0, max(1, len(content)), PIECE_BYTES):
            yield name, content[start : start + PIECE_BYTES]
