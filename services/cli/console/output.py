"""The option `--console FILE.html`, and the file."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from services.frontend.console.asset_files import asset_files
from services.frontend.console.recorded import recording
from services.frontend.console.single_page import single_page

Command = Callable[..., None]


def console_option(command: Command) -> Command:
    """Add --console to a command, as `console_path`."""
    return click.option(
        "--console",
        "console_path",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Write the run as a console with a time slider: one HTML file that needs no server (docs/console.md).",
    )(command)


def write_console(path: Path, title: str, runs: Sequence[bytes], *, is_simulated: bool) -> None:
    """`runs`: encoded recorded runs, those to be shown side by side at first in front."""
    page = single_page(asset_files(), recording(title, runs, is_simulated=is_simulated))
    path.write_bytes(page)
    click.echo(f"{path}: {len(page) / 1e6:,.1f} MB; open it in a browser", file=sys.stderr)
