"""Fixes of the past can be taken out of today's code, and the documentation says which seed misses each."""

from pathlib import Path

import pytest

from scripts.without_fix import PATCHES, apply

pytestmark = pytest.mark.live

DOCUMENTATION = Path(__file__).resolve().parents[3] / "docs" / "fault_simulation.md"
ALL = sorted(PATCHES.glob("*.patch"))


def test_there_are_some() -> None:
    assert len(ALL) >= 10


@pytest.mark.parametrize("patch", ALL, ids=lambda patch: patch.stem)
def test_a_patch_fits_the_code(patch: Path, tmp_path: Path) -> None:
    for file in apply(patch, tmp_path):
        compile(file.read_text(), file.name, "exec")
    assert f"| {patch.stem} |" in DOCUMENTATION.read_text(), "its row is missing in the table of what was found"
