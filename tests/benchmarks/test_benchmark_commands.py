"""The benchmarks that the documentation names are those that there are, with the options that it shows."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"__init__", "english", "frontend_hops", "kv_throughput_process", "process_cpu"}
"""Modules of `benchmarks` that are no benchmarks by themselves."""
SHOWN = re.compile(r"python -m benchmarks\.(?P<module>\w+)(?P<options>[^`#\n]*)")
MODULES = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - PARTS | {
    path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")
}


def shown_commands() -> list[tuple[str, re.Match[str]]]:
    folders = ("*.md", "docs/**/*.md", "benchmarks/*.md", "benchmarks/**/*.py")
    pages = [page for pattern in folders for page in sorted(ROOT.glob(pattern))]
    texts = [(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")) for page in pages]
    return [(name, match) for name, text in texts for match in SHOWN.finditer(text)]


def unknown_options(module: str, options: str) -> list[str]:
    """Those of a command line that the module's own text does not name."""
    path = ROOT / "benchmarks" / f"{module}.py"
    source = (path if path.is_file() else path.with_suffix("") / "__main__.py").read_text(encoding="utf-8")
    return [option for option in re.findall(r"--[a-z][a-z-]*", options) if f'"{option}"' not in source]


def test_every_benchmark_is_run_by_a_test() -> None:
    tests = (Path(__file__).parent / "test_benchmarks_run.py").read_text(encoding="utf-8")
    assert set(re.findall(r"^def test_(\w+)\(", tests, re.MULTILINE)) == MODULES


def test_every_benchmark_is_shown_and_every_command_shown_is_right() -> None:
    commands = shown_commands()
    assert {match["module"] for _, match in commands} == MODULES
    wrong = {f"{page}: {match[0]}": unknown_options(match["module"], match["options"]) for page, match in commands}
    assert not {command: options for command, options in wrong.items() if options}


def test_an_option_that_there_is_not_is_found() -> None:
    assert unknown_options("rescheduler", " --runs 1 --no-such 2 --json OUT") == ["--no-such"]
