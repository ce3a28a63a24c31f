"""Takes a fix of the past out of the code and tries seeds of `penstock fuzz` until one fails that passes with the fix.

    python scripts/without_fix.py 7b73c1e              how many seeds that takes, and what failed
    python scripts/without_fix.py 7b73c1e --seed 14    this one, made as small as possible and told

What to take out is in tests/fault_simulation/taken_out_fixes: a patch for each, with what the fix mends in its first
line. Patched are copies, from which their modules are imported: the working tree stays as it is, and so does the place
of everything else, on which a seed depends by the nanosecond. Exit status: 0 it is found, 1 it is not.
"""

import argparse
import subprocess
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
PATCHES: Final = ROOT / "tests" / "fault_simulation" / "taken_out_fixes"


class PatchedModules(MetaPathFinder):
    """Finds modules in a folder before they are looked for elsewhere."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Called by the import system."""
        file = self._folder.joinpath(*fullname.split(".")).with_suffix(".py")
        return spec_from_file_location(fullname, file) if file.exists() else None


def apply(patch: Path, folder: Path) -> list[Path]:
    """Copy the files that a patch changes to a folder, change them there and return them. Raises CalledProcessError
    where the patch does not fit the code any more."""
    names = [line.removeprefix("+++ b/") for line in patch.read_text().splitlines() if line.startswith("+++ b/")]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    subprocess.run(["git", "apply", "--verbose", str(patch)], cwd=folder, check=True, capture_output=True)
    return [folder / name for name in names]


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fix", choices=sorted(patch.stem for patch in PATCHES.glob("*.patch")))
    parser.add_argument("--seed", type=int, help="tell this one instead")
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--count", type=int, default=200, help="seeds to try at most")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        apply(PATCHES / f"{given.fix}.patch", Path(folder))
        sys.meta_path.insert(0, PatchedModules(Path(folder)))
        if given.seed is not None:
            from services.cli.fuzz import command

            command(["--seed", str(given.seed)])
        return _hunt(range(given.first, given.first + given.count))


def _hunt(seeds: range) -> int:
    from fault_simulation.run import run_seed

    for seed in seeds:
        outcome = run_seed(seed)
        if outcome.violations and _passes_with_fix(seed):
            print(f"seed {seed} fails, {seed - seeds.start + 1} tried:", *outcome.violations, sep="\n    ")
            return 0
    print(f"not found by {len(seeds)} seeds")
    return 1


def _passes_with_fix(seed: int) -> bool:
    """In a process of its own, where nothing is taken out."""
    fuzz = [sys.executable, "-m", "services.cli.main", "fuzz", "--seed", str(seed), "--no-shrink", "--json", "-"]
    return subprocess.run(fuzz, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
