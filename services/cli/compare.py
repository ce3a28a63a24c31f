"""`penstock compare`: several placement policies on the same trace and the same simulated mesh."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from controlplane.policies.registry import POLICIES
from services.cli.report_output import check_outputs, output_options, print_notices, write_reports
from services.cli.simulation.options import cluster_options, plan_of, read_requests
from services.cli.simulation.parallel_runs import simulate_in_parallel
from services.cli.simulation.progress import progress_bars
from services.cli.simulation.run import load_rows
from services.cli.trace_options import slo_of, trace_options
from simulator.fluid_bound import fluid_bound
from simulator.report.plot import draw_comparison
from simulator.report.report import summarise
from simulator.traces.request import TraceRequest

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
    "--set",
    "settings",
    multiple=True,
    metavar="POLICY:PARAMETER=VALUE",
    help="Of a policy among those that run; repeatable.",
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
    settings: tuple[str, ...],
    processes: int,
    json_path: str | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Run several policies on the same trace and simulated mesh, in parallel, and show their reports side by side.

    The JSON form is {"reports": {POLICY: REPORT}, "loads": {POLICY: LOAD}, "offered_req_s", "fluid_bound_req_s"}; the
    fluid bound is a rate that no policy could exceed (docs/simulation.md). Exit status: 0 done, 1 some requests
    failed, 2 used wrongly.
    """
    check_outputs(json_path, plot_path)
    slo = slo_of(options)
    chosen = policies or POLICIES.usable()
    _check_settings(settings, chosen)
    plans = {policy: plan_of(options, policy, _settings_of(policy, settings)) for policy in chosen}
    plan = next(iter(plans.values()))
    requests = read_requests(plan)
    bound = fluid_bound(requests, plan.cluster, plan.costs.create())
    with progress_bars(plans, len(requests)) as show:
        runs = simulate_in_parallel(plans, min(processes, len(plans)), show)
    reports = {
        policy: summarise(run.outcomes, slo, policy=policy, seed=options["seed"]) for policy, run in runs.items()
    }
    offered_req_s = _offered_req_s(requests)
    document = {
        "reports": reports,
        "loads": {policy: run.load for policy, run in runs.items()},
        "offered_req_s": offered_req_s,
        "fluid_bound_req_s": bound.requests_per_s,
    }
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    write_reports(reports, encoded, json_path, {policy: load_rows(run.load) for policy, run in runs.items()})
    print_notices(
        [f"offered: {offered_req_s:,.2f} requests/s; no schedule could serve more than {bound.requests_per_s:,.2f}"]
    )
    if plot_path is not None:
        outcomes = {policy: run.outcomes for policy, run in runs.items()}
        curves = {policy: run.curve for policy, run in runs.items()}
        draw_comparison(plot_path, outcomes, curves, slo, title=Path(options["trace"]).name)
    ctx.exit(EXIT_ERRORS if any(report.errors for report in reports.values()) else 0)


def _offered_req_s(requests: Sequence[TraceRequest]) -> float:
    """Over the time in which they arrive; of a closed loop as its trace saw it."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return (len(requests) - 1) / span_s if span_s > 0 else 0.0


def _settings_of(policy: str, settings: Sequence[str]) -> tuple[str, ...]:
    """Those that are about a policy, without its name."""
    name = policy.partition(":")[0]
    return tuple(text.partition(":")[2] for text in settings if text.partition(":")[0] == name)


def _check_settings(settings: Sequence[str], policies: Sequence[str]) -> None:
    names = {policy.partition(":")[0] for policy in policies}
    for text in settings:
        name, colon, _ = text.partition(":")
        if not colon or name not in names:
            raise click.BadParameter(
                f"{text!r} is not of the form POLICY:PARAMETER=VALUE with a policy among {', '.join(sorted(names))}",
                param_hint="--set",
            )
