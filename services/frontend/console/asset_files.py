"""The files that the console's page consists of, out of the package."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

PACKAGE: Final = "services.frontend.console"


def asset_files() -> dict[str, bytes]:
    """All of them, by their paths below `assets`."""
    found: dict[str, bytes] = {}
    _gather(files(PACKAGE) / "assets", "", found)
    return found


def _gather(folder: Traversable, prefix: str, found: dict[str, bytes]) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _gather(entry, f"{prefix}{entry.name}/", found)
        else:
            found[f"{prefix}{entry.name}"] = entry.read_bytes()
