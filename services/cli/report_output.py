"""Where a report goes: the terminal, a JSON file, a PNG."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

from services.cli.terminal_table import print_table
from simulator.report.plot import require_matplotlib
from simulator.report.report import Report
from simulator.report.table import report_table

STDOUT = "-"

Command = Callable[..., None]


def output_options(command: Command) -> Command:
    """Add --json and --plot to a command, as `json_path` and `plot_path`."""
    command = click.option(
        "--plot",
        "plot_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the CDFs of TTFT, TPOT and end-to-end latency as a PNG; of a simulation the load over time too.",
    )(command)
    return click.option(
        "--json",
        "json_path",
        type=click.Path(dir_okay=False, allow_dash=True),
        help="Write the report as JSON; - prints it instead of the table.",
    )(command)


def check_outputs(json_path: str | None, plot_path: Path | None, console_path: Path | None = None) -> None:
    """Before a long run, not after it."""
    paths = [Path(json_path)] if json_path not in (None, STDOUT) else []
    for path in (*paths, *(each for each in (plot_path, console_path) if each)):
        check_writable(path)
    if plot_path:
        require_matplotlib()


def check_writable(path: Path) -> None:
    """Raises UsageError if a file cannot be written there; makes none."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise click.UsageError(f"cannot write {path}: its directory does not exist")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise click.UsageError(f"cannot write {path}: no permission")


def write_reports(
    reports: Mapping[str, Report],
    document: bytes,
    json_path: str | None,
    more: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """`document` is their JSON form; the table has a column for each, with the rows that `more` has for it too."""
    if json_path == STDOUT:
        click.echo(document, nl=False)
        return
    if json_path is not None:
        Path(json_path).write_bytes(document)
    print_table(report_table(reports, more=more))


def print_notices(lines: Iterable[str]) -> None:
    """Print lines to stderr, so that stdout stays the report's."""
    for line in lines:
        click.echo(line, err=True)
