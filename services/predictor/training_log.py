"""The course of a training, as it is kept beside the artefact."""

from pathlib import Path
from typing import Final

import msgspec

from mesh.errors import ConfigurationError

LOG_FILE: Final = "training.json"


class LoggedEpoch(msgspec.Struct, frozen=True):
    """Errors of one epoch, in tokens."""

    number: int
    train_mae_tokens: float
    validation_mae_tokens: float


def write_log(folder: Path, epochs: list[LoggedEpoch]) -> None:
    """Write the epochs of a training to the folder, replacing an older log."""
    (folder / LOG_FILE).write_bytes(msgspec.json.encode(epochs) + b"\n")


def read_log(folder: Path) -> list[LoggedEpoch]:
    """Raises `ConfigurationError` if there is none."""
    file = folder / LOG_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[LoggedEpoch])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} is no log of a training: {error}") from error
