"""`penstock reproduce`: a paper's experiments on the simulated mesh, beside what the paper reports."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from simulator.report.plot import require_matplotlib
from simulator.reproductions.page import show
from simulator.reproductions.parallel import OnDone
from simulator.reproductions.registry import PAGE_FILE, PAPERS, reproduce
from simulator.reproductions.report import ReproductionReport, encode_report
from simulator.reproductions.run import ReproductionRun


@click.command()
@click.argument("paper", type=click.Choice(list(PAPERS)))
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the data sets, with traces/ in it.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for report.json, report.md and plots/; made if need be.",
)
@click.option("--quick", is_flag=True, help="The same rows from shorter runs: at most two minutes on two cores.")
@click.option(
    "--seed",
    type=click.IntRange(min=0, max=(1 << 63) - 1),
    default=0,
    show_default=True,
    help="Everything that is drawn follows from it.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    default=lambda: os.cpu_count() or 1,
    show_default="one for each CPU",
    help="How many simulations run at the same time.",
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the table.")
def command(paper: str, data: Path, out: Path, quick: bool, seed: int, processes: int, as_json: bool) -> None:
    """Measure again what PAPER reports, on the simulated mesh with the mesh's own policies.

    Equal options give equal rows. Exit status: 0 measured, whether or not the figures agree, 1 failed, 2 used wrongly.
    """
    require_matplotlib()
    with _progress(paper) as on_done:
        report = reproduce(paper, ReproductionRun(data, out, seed, quick, processes, on_done))
    if as_json:
        click.echo(encode_report(report), nl=False)
        return
    Console().print(_table(report))
    click.echo(f"{out / PAGE_FILE} has the whole page, with plots", err=True)


@contextmanager
def _progress(paper: str) -> Iterator[OnDone]:
    """A bar on a terminal, otherwise a line for each run that is done; on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(paper, total=None)

        def on_done(name: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=f"{paper}: {name}")
            if not console.is_terminal:
                click.echo(f"{paper}: {done} of {total} done: {name}", err=True)

        yield on_done


def _table(report: ReproductionReport) -> Table:
    table = Table(title=f"{report.paper}, seed {report.seed}, {report.seconds:.0f} s", title_justify="left")
    for header in ("claim", "paper", "ours", "unit", "why"):
        table.add_column(header, justify="right" if header in ("paper", "ours") else "left", overflow="fold")
    for row in report.rows:
        table.add_row(row.claim, show(row.paper), show(row.ours), row.unit, row.why)
    return table
