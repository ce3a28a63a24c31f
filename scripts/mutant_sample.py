"""Prints names of mutants drawn at random, for `make mutants SAMPLE=...` where all would take too long.

They come from what mutmut has made already, in `mutants/`. Equal seeds give equal orders as long as the sources stay
the same, and `--first` goes on where a sample before has ended: mutants whose survivors led to tests do not measure
those tests. Exit status 1 where there are none: mutmut without a name tries all.
"""

import argparse
import json
import sys
from pathlib import Path
from random import Random
from typing import Final

ROOT: Final = Path("mutants")


def main() -> None:
    """Print one name a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="folders or files, such as controlplane/protocols/migration")
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--first", type=int, default=0, help="place in the order to begin at")
    parser.add_argument("--count", type=int, default=100)
    given = parser.parse_args()
    made = sorted(path for path in ROOT.rglob("*.meta") if _is_of(path.relative_to(ROOT).as_posix(), given.sources))
    names = [name for path in made for name in sorted(json.loads(path.read_text())["exit_code_by_key"])]
    Random(given.seed).shuffle(names)
    drawn = names[given.first : given.first + given.count]
    if not drawn:
        sys.exit(f"mutmut has made {len(names)} mutants of {' '.join(given.sources)}: none is left to be drawn")
    print("\n".join(drawn))


def _is_of(path: str, sources: list[str]) -> bool:
    return any(path == f"{each}.meta" or path.startswith(f"{each.rstrip('/')}/") for each in sources)


if __name__ == "__main__":
    main()
