"""The `penstock` commands that the documentation shows."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
OF_EXAMPLE = "fewest_tokens"
"""The policy of docs/examples/plugin, which is not installed."""
_COMMAND = re.compile(r"^(?:    )?(?:PENSTOCK_\S+=\S+ )*(?:\S*/)?penstock (?P<words>[a-z].*)$")
_PLACEHOLDERS = re.compile(r"\.\.\.|\[|\bROLE\b|\|")
_NUMBER_OPTIONS = re.compile(r"(?<=--)(?P<name>[a-z-]+)[ =](?:N|M)\b")


def command_lines(page: Path) -> Iterator[str]:
    """Lines of code that begin with `penstock`, without what a shell makes of their ends, and without placeholders that
    stand for several words."""
    text = page.read_text("utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        found = _COMMAND.match(line)
        if found is None or not (line.startswith("    ") or page.name == "operations.md"):
            continue
        words = re.split(r"\s+(?:#|>>?|&&)\s|\s{3,}\(|;", found["words"] + " ")[0].strip()
        if not _PLACEHOLDERS.search(words) and OF_EXAMPLE not in words:
            yield _NUMBER_OPTIONS.sub(r"\g<name>=1", words)


COMMAND_LINES = [(page, line) for page in PAGES for line in command_lines(page)]
