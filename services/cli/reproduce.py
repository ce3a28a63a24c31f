"""`penstock reproduce`: a paper's experiments on the simulated mesh, beside what the paper reports."""

import os
from pathlib import Path

import click
from rich.table import Table

from services.cli.simulation.progress import job_progress
from services.cli.terminal_table import print_table
from simulator.report.plot import require_matplotlib
from simulator.reproductions.page import show, show_measured
from simulator.reproductions.registry import PAGE_FILE, PAPERS, reproduce
from simulator.reproductions.report import ReproductionReport, encode_report
from simulator.reproductions.run import EngineEra, ReproductionRun


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
@click.option("--quick", is_flag=True, help="The same rows from shorter runs: a few minutes on two cores.")
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
@click.option(
    "--engine-era",
    type=click.Choice([str(each) for each in EngineEra]),
    default=str(EngineEra.CURRENT),
    show_default=True,
    help="Whose admission the modelled engines have, vLLM 0.9's or today's; for star.",
)
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add results to this file as they come, and take those that it has from it: goes on after a stop; for arrow, "
    "cascadia, lmetric and star.",
)
@click.option("--json", "as_json", is_flag=True, help="Print report.json instead of the table.")
def command(
    paper: str,
    data: Path,
    out: Path,
    quick: bool,
    seed: int,
    processes: int,
    engine_era: str,
    journal: Path | None,
    as_json: bool,
) -> None:
    """Measure again what PAPER reports, on the simulated mesh with the mesh's own policies.

    Equal options give equal rows. Exit status: 0 measured, whether or not the figures agree, 1 failed, 2 used wrongly.
    """
    require_matplotlib()
    with job_progress(paper) as on_done:
        era = EngineEra(engine_era)
        report = reproduce(paper, ReproductionRun(data, out, seed, quick, processes, on_done, era, journal))
    if as_json:
        click.echo(encode_report(report), nl=False)
        return
    print_table(_table(report))
    click.echo(f"{out / PAGE_FILE} has the whole page, with plots", err=True)


def _table(report: ReproductionReport) -> Table:
    table = Table(title=f"{report.paper}, seed {report.seed}, {report.seconds:.0f} s", title_justify="left")
    for header in ("claim", "paper", "ours", "unit", "why"):
        table.add_column(header, justify="right" if header in ("paper", "ours") else "left", overflow="fold")
    for row in report.rows:
        table.add_row(row.claim, show(row.paper), show_measured(row), row.unit, row.why)
    return table
