"""The files of a checkpoint that turn text into tokens and back: all that a frontend needs of a model.

Workers announce a hash of them and hand them out, so that frontends need no checkpoint.
"""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

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
MAX_TEXT_BYTES: Final = 128 * 1024 * 1024
"""Of all of them together; the largest tokenizers in use (262k tokens) have 33 MiB."""
PIECE_BYTES: Final = 1024 * 1024

TextFiles = Mapping[str, bytes]
"""Contents by name; what a checkpoint does not have is not there."""


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
