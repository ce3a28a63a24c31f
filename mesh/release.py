"""Which release of Penstock this is, and of which commit.

The version stands in pyproject.toml alone. The commit is written into a wheel when it is built (scripts/build_hook.py);
in a checkout git tells it.
"""

import subprocess
from importlib.metadata import version as distribution_version
from pathlib import Path

COMMIT_FILE = "COMMIT"
GIT_DEADLINE_S = 5.0
_HERE = Path(__file__).resolve().parent


def version() -> str:
    """Of the installed package."""
    return distribution_version("penstock")


def commit(package: Path = _HERE) -> str:
    """Abbreviated, with `-dirty` behind it where the checkout has been changed; empty if nobody knows.

    `package` is this package's folder. In a checkout this runs git, so it is not for an event loop.
    """
    written = package / COMMIT_FILE
    if written.is_file():
        return written.read_text("utf-8").strip()
    return commit_of_checkout(package.parent)


def commit_of_checkout(root: Path) -> str:
    """As git tells it; empty where `root` is no checkout, or there is no git."""
    if not (root / ".git").exists():
        return ""
    describe = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=GIT_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def release_line() -> str:
    """For people: version and commit in one line."""
    known = commit()
    return f"{version()} (commit {known or 'unknown'})"
