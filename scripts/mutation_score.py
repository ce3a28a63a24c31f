"""Prints, for each module that mutmut has changed, how many of its mutants the tests have killed, and the others.

Mutants that behave as the original does are listed in `tests/equivalent_mutants.toml`, each with the reason, and do not
count. Exit status 1 while less than 90 % of the rest are killed.
"""

import json
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from difflib import ndiff
from pathlib import Path
from typing import Final

WANTED: Final = 0.9
ROOT: Final = Path("mutants")
EQUIVALENT: Final = Path("tests/equivalent_mutants.toml")
SURVIVED: Final = 0
UNREACHED: Final = frozenset({5, 33})
"""Exit codes of mutmut. All others are tests that failed, or did not come to an end."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one function."""

    name: str
    """As `mutmut show` knows it."""
    function: str
    change: tuple[str, ...]
    """Lines of the original, behind "- ", and of the mutant, behind "+ "."""
    code: int
    """Exit code of its tests."""

    @property
    def is_killed(self) -> bool:
        """Whether a test noticed."""
        return self.code != SURVIVED and self.code not in UNREACHED

    def is_listed(self, equivalents: list[dict[str, str]]) -> bool:
        """Whether it is known to behave as the original."""
        added = {line[2:] for line in self.change if line.startswith("+ ")}
        return any(each["function"] == self.function and each["becomes"] in added for each in equivalents)


def main() -> int:
    """Print the table, then the survivors."""
    equivalents = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    total: Counter[str] = Counter()
    survivors: list[Mutant] = []
    for path in sorted(ROOT.rglob("*.py")):
        if not path.with_suffix(".py.meta").exists():
            continue
        found: Counter[str] = Counter()
        for mutant in _tried(path):
            if mutant.is_killed:
                found["killed"] += 1
            elif mutant.is_listed(equivalents):
                found["equivalent"] += 1
            else:
                found["survived"] += 1
                survivors.append(mutant)
        if found:
            print(f"{_row(found)}  {path.relative_to(ROOT)}")
            total += found
    if not total:
        print("nothing was tried: run `make mutants` first")
        return 1
    print(f"{_row(total)}  in all")
    for mutant in survivors:
        print(f"\n{mutant.name}{'  (no test reaches it)' if mutant.code in UNREACHED else ''}")
        print("\n".join(f"    {line}" for line in mutant.change))
    return int(total["killed"] < WANTED * (total["killed"] + total["survived"]))


def _row(found: Counter[str]) -> str:
    counted = found["killed"] + found["survived"]
    share = 100 * found["killed"] / counted if counted else 100.0
    return f"{found['killed']:5} of {counted:5} killed, {share:5.1f} %, {found['equivalent']:3} equivalent"


def _tried(path: Path) -> list[Mutant]:
    codes = json.loads(path.with_suffix(".py.meta").read_text())["exit_code_by_key"]
    spans = json.loads(path.with_suffix(".py.spans").read_text())["spans"]
    lines = path.read_text().splitlines()
    return [_mutant(name, code, spans, lines) for name, code in codes.items() if code is not None]


def _mutant(name: str, code: int, spans: dict[str, list[int]], lines: list[str]) -> Mutant:
    module, _, mangled = name.rpartition(".")
    original = mangled.rpartition("_")[0] + "_orig"
    before, after = (
        [line.strip().replace(own_name, "") for line in lines[start - 1 : end]]
        for own_name, (start, end) in ((original, spans[original]), (mangled, spans[mangled]))
    )
    change = tuple(line for line in ndiff(before, after) if line.startswith(("+ ", "- ")))
    plain = mangled.rpartition("__mutmut_")[0].removeprefix("x").replace("ǁ", ".").removeprefix("_").removeprefix(".")
    return Mutant(name, f"{module}.{plain}", change, code)


if __name__ == "__main__":
    sys.exit(main())
