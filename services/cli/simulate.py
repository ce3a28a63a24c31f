"""`penstock simulate`: a trace through a simulated mesh, with the report of `penstock bench`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from controlplane.policies.registry import DEFAULT_POLICY
from services.cli.console.output import console_option, write_console
from services.cli.report_output import check_outputs, output_options, write_reports
from services.cli.simulation.options import cluster_options, plan_of, read_requests
from services.cli.simulation.plan import ConsoleChoice, simulate
from services.cli.simulation.progress import progress_bars
from services.cli.simulation.run import load_rows
from services.cli.trace_options import slo_of, trace_options
from services.frontend.console.recorded import MAX_RECORDING_BYTES
from simulator.report.plot import draw_comparison
from simulator.report.report import encode_report, summarise

EXIT_ERRORS = 1


@click.command()
@trace_options
@click.option(
    "--policy",
    default=DEFAULT_POLICY,
    show_default=True,
    metavar="NAME[:PARAMETER=VALUE,...]",
    help="Placement policy, as `penstock policy` lists them.",
)
@click.option("--set", "settings", multiple=True, metavar="PARAMETER=VALUE", help="Of the policy; repeatable.")
@cluster_options
@output_options
@console_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    policy: str,
    settings: tuple[str, ...],
    json_path: str | None,
    plot_path: Path | None,
    console_path: Path | None,
    **options: Any,
) -> None:
    """Run a trace through a simulated mesh and report latency, throughput and goodput.

    Table, placement and policy are those of the live mesh; docs/simulation.md says what is modelled. The same
    options give the same report. Exit status: 0 done, 1 some requests failed, 2 used wrongly.
    """
    check_outputs(json_path, plot_path, console_path)
    plan, slo = plan_of(options, policy, settings), slo_of(options)
    if console_path is not None:
        plan = replace(plan, console=ConsoleChoice(policy, slo, MAX_RECORDING_BYTES))
    requests = read_requests(plan)
    with progress_bars([policy], len(requests)) as show:
        run = simulate(plan, requests, partial(show, policy))
    report = summarise(run.outcomes, slo, policy=policy, seed=plan.recipe.seed)
    write_reports({policy: report}, encode_report(report), json_path, {policy: load_rows(run.load)})
    if plot_path is not None:
        title = Path(plan.recipe.source).name
        draw_comparison(plot_path, {policy: run.outcomes}, {policy: run.curve}, slo, title)
    if console_path is not None and run.recorded is not None:
        write_console(console_path, Path(plan.recipe.source).name, [run.recorded], is_simulated=True)
    ctx.exit(EXIT_ERRORS if report.errors else 0)
