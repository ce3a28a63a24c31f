"""Latency tables in a file, kept from one plan to the next."""

from collections.abc import Sized
from pathlib import Path

import msgspec

from mesh.errors import ConfigurationError
from services.cli.report_output import print_notices
from simulator.cascade.curves import StoredCurve

TABLES_FORMAT = 3
"""1 was a bare list of curves without means, 2 had curves of runs that were counted from their beginning."""


class TablesFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a file of latency tables, which saves simulating them again."""

    format: int
    curves: tuple[StoredCurve, ...]


class _AnyFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    curves: list[dict[str, object]]


def read_tables(path: Path | None) -> tuple[StoredCurve, ...]:
    """The stored tables; none if there is no file yet. Tables of earlier formats are dropped with a notice, because
    they lack means, or are not of steady states.

    Raises `ConfigurationError` for a file that holds something else.
    """
    if path is None or not path.exists():
        return ()
    content = path.read_bytes()
    try:
        held = msgspec.json.decode(content, type=_AnyFormat | list[dict[str, object]])
        if isinstance(held, _AnyFormat) and held.format == TABLES_FORMAT:
            return msgspec.json.decode(content, type=TablesFile).curves
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigurationError(f"{path} holds no latency tables ({error}): choose another file") from error
    if isinstance(held, _AnyFormat):
        if held.format > TABLES_FORMAT:
            raise ConfigurationError(
                f"{path} holds tables of format {held.format}, not {TABLES_FORMAT}: choose another file"
            )
        return _dropped(path, held.curves, "of an older form, not of steady states")
    if not all(curve.keys() >= {"key", "rates_per_s", "p95_s"} for curve in held):
        raise ConfigurationError(f"{path} holds no latency tables (a list of something else): choose another file")
    return _dropped(path, held, "of an older form without means")


def _dropped(path: Path, tables: Sized, why: str) -> tuple[StoredCurve, ...]:
    print_notices([f"{path}: its {len(tables)} tables are {why}; the missing ones are simulated"])
    return ()


def write_tables(path: Path | None, curves: tuple[StoredCurve, ...]) -> None:
    """Replaces the file at once, so that an interrupted run leaves the old one whole."""
    if path is None:
        return
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.encode(TablesFile(TABLES_FORMAT, curves)))
    new.replace(path)
