"""Tells checkpoints apart without reading all of their gigabytes."""

import hashlib
from pathlib import Path
from typing import Final

from mesh.errors import ConfigurationError

WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt")
_SAMPLE_BYTES: Final = 1024 * 1024


def checkpoint_fingerprint(model_path: Path) -> str:
    """16 hexadecimal digits over config.json and, of each file of weights, its name, its size and the first and last
    megabyte: equal for copies of a checkpoint, different once it is trained on. Raises ConfigurationError."""
    digest = hashlib.sha256()
    try:
        digest.update((model_path / "config.json").read_bytes())
        for file in sorted({file for pattern in WEIGHT_FILES for file in model_path.glob(pattern)}):
            size = file.stat().st_size
            digest.update(f"{file.name}:{size}:".encode())
            with file.open("rb") as content:
                digest.update(content.read(_SAMPLE_BYTES))
                content.seek(max(0, size - _SAMPLE_BYTES))
                digest.update(content.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigurationError(f"{model_path} cannot be read as a checkpoint: {error}") from error
    return digest.hexdigest()[:16]
