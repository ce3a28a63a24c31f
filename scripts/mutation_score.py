"""Prints, for each module that mutmut has changed, how many of its mutants the tests have killed."""

import json
import sys
from collections import Counter
from pathlib import Path

KILLED, SURVIVED, UNREACHED = "killed", "survived", "unreached"
OUTCOMES = {0: SURVIVED, 1: KILLED, 3: KILLED, 5: UNREACHED, 33: UNREACHED, 37: KILLED}
"""By mutmut's exit codes; all others are tests that did not come to an end, which is noticed, too."""


def main() -> int:
    """Exit status 1 while less than 90 % of those that were tried are killed."""
    total: Counter[str] = Counter()
    for path in sorted(Path("mutants").rglob("*.py.meta")):
        codes = json.loads(path.read_text())["exit_code_by_key"].values()
        found = Counter(OUTCOMES.get(code, KILLED) for code in codes if code is not None)
        if found:
            print(f"{_row(found)}  {path.relative_to('mutants').with_suffix('')}")
            total += found
    if total:
        print(f"{_row(total)}  in all")
    return int(total[KILLED] < 0.9 * total.total())


def _row(found: Counter[str]) -> str:
    return f"{found[KILLED]:5} of {found.total():5} killed, {100 * found[KILLED] / found.total():5.1f} %"


if __name__ == "__main__":
    sys.exit(main())
