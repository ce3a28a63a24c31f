"""Runs a command and says at its end how much CPU it and its children took; warns where that is more than wished.

    python scripts/cpu_limit.py SECONDS COMMAND [ARGUMENT ...]

CPU, not time: it is the same on a busy machine. Exit status: the command's own.
"""

import resource
import subprocess
import sys


def main() -> int:
    """Returns the exit status."""
    limit_s, command = float(sys.argv[1]), sys.argv[2:]
    status = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    verdict = (
        f"more than the {limit_s:.0f} s that it should" if cpu_s > limit_s else f"at most {limit_s:.0f} s is wanted"
    )
    print(f"took {cpu_s:.0f} s of CPU; {verdict}", file=sys.stderr)
    if cpu_s > limit_s:
        print(
            "a first run compiles all tests, and mypy has no cache; after a second one, look at --durations=20",
            file=sys.stderr,
        )
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
