"""Generates the stubs when a wheel or an editable install is built."""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ProtoBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """`generated/penstock` goes into the wheel; an editable install finds it through `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before the files are collected."""
        sys.path.insert(0, str(Path(self.root) / "scripts"))
        from generate_protos import generate

        generate(Path(self.root))
        if self.target_name == "wheel" and version != "editable":
            build_data["force_include"][str(Path(self.root) / "generated" / "penstock")] = "penstock"
