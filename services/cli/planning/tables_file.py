"""Latency tables between two plans."""

from pathlib import Path

import msgspec

from mesh.errors import ConfigurationError
from simulator.cascade.curves import StoredCurve


def read_tables(path: Path | None) -> tuple[StoredCurve, ...]:
    """None where there is no file yet. Raises `ConfigurationError` for a file that holds something else."""
    if path is None or not path.exists():
        return ()
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[StoredCurve, ...])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path} holds no latency tables ({error}): choose another file") from error


def write_tables(path: Path | None, curves: tuple[StoredCurve, ...]) -> None:
    """Replaces the file at once, so that an interrupted run leaves the old one whole."""
    if path is None:
        return
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.encode(curves))
    new.replace(path)
