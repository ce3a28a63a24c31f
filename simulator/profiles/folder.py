"""Gzipped tables of a folder of measurements."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

from mesh.errors import ConfigurationError


class ProfileFolder:
    """`profiles/` of a data folder, or the folder itself. Raises `ConfigurationError` for what cannot be read."""

    def __init__(self, data: Path) -> None:
        self.path = data / "profiles" if (data / "profiles").is_dir() else data

    def rows(self, name: str) -> list[dict[str, str]]:
        """The rows of `NAME.csv.gz` as dictionaries by column. Raises `ConfigurationError` where it cannot be read."""
        return list(csv.DictReader(self._text(f"{name}.csv.gz").splitlines()))

    def document(self, name: str) -> Any:
        """The parsed JSON of `NAME.json.gz`. Raises `ConfigurationError` where it cannot be read."""
        return json.loads(self._text(f"{name}.json.gz"))

    def names(self, prefix: str) -> tuple[str, ...]:
        """The ends of the names of all tables that begin with `prefix`, without .csv.gz, sorted."""
        return tuple(sorted(path.name[len(prefix) : -len(".csv.gz")] for path in self.path.glob(f"{prefix}*.csv.gz")))

    def _text(self, name: str) -> str:
        path = self.path / name
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                return file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"cannot read {path}: {error}; --data names the folder whose profiles/ holds it"
            ) from error
