"""Generates the stubs when a wheel or an editable install is built, and writes down which commit a package is of."""

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMMIT_VARIABLE = "PENSTOCK_COMMIT"
"""For builds that git's folder is kept from, such as those of container images."""


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """`generated/penstock` goes into the wheel; an editable install finds it through `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the files are collected."""
        root = Path(self.root)
        if self.target_name == "sdist":
            build_data["force_include"][str(self._write_commit(root))] = "COMMIT"
            return
        sys.path.insert(0, str(root / "scripts"))
        from generate_protos import generate

        generate(root)
        if version != "editable":
            build_data["force_include"][str(root / "generated" / "penstock")] = "penstock"
            build_data["force_include"][str(self._write_commit(root))] = "mesh/COMMIT"

    def _write_commit(self, root: Path) -> Path:
        """Into a file of the build; a source distribution keeps the one that it was made with."""
        made_with = root / "COMMIT"
        if made_with.is_file():
            return made_with
        sys.path.insert(0, str(root))
        from mesh.release import commit_of_checkout

        path = root / "build" / "COMMIT"
        path.parent.mkdir(exist_ok=True)
        path.write_text(os.environ.get(COMMIT_VARIABLE) or commit_of_checkout(root), encoding="utf-8")
        return path
