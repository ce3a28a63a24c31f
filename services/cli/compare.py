"""`penstock compare`: several placement policies on the same trace and the same simulated mesh."""

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from controlplane.policies.registry import POLICIES
from services.cli.report_output import check_outputs, output_options, write_reports
from services.cli.simulation.options import cluster_options, plan_of, read_requests
from services.cli.simulation.progress import progress_bars
from services.cli.simulation.side_by_side import simulate_side_by_side
from services.cli.trace_options import slo_of, trace_options
from simulator.report.plot import draw_cdfs
from simulator.report.report import summarise

EXIT_ERRORS = 1


@click.command()
@trace_options
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME[:PARAMETER=VALUE,...]",
    help="May be given many times; default: all policies, with their defaults.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 1024),
    default=lambda: os.cpu_count() or 1,
    show_default="one for each CPU",
    help="How many simulations run at the same time.",
)
@cluster_options
@output_options
@click.pass_context
def command(
    ctx: click.Context,
    /,
    policies: tuple[str, ...],
    processes: int,
    json_path: str | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Run several policies on the same trace and simulated mesh, in parallel, and show their reports side by side.

    The JSON form is {"reports": {POLICY: REPORT}}. Exit status: 0 done, 1 some requests failed, 2 used wrongly.
    """
    check_outputs(json_path, plot_path)
    slo = slo_of(options)
    plans = {policy: plan_of(options, policy) for policy in policies or tuple(POLICIES)}
    requests = read_requests(next(iter(plans.values())))
    with progress_bars(plans, len(requests)) as show:
        runs = simulate_side_by_side(plans, min(processes, len(plans)), show)
    reports = {
        policy: summarise(outcomes, slo, policy=policy, seed=options["seed"]) for policy, outcomes in runs.items()
    }
    document = msgspec.json.format(msgspec.json.encode({"reports": reports}), indent=2) + b"\n"
    write_reports(reports, document, json_path)
    if plot_path is not None:
        draw_cdfs(plot_path, runs, slo, title=Path(options["trace"]).name)
    ctx.exit(EXIT_ERRORS if any(report.errors for report in reports.values()) else 0)
