"""`penstock compare --suite regret`: the options' cluster through the regret suite, and its table."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from controlplane.policies.lmetric import LMetric
from services.cli.report_output import STDOUT
from services.cli.simulation.costs import costs_of
from services.cli.simulation.options import cluster_of
from services.cli.simulation.progress import job_progress
from services.cli.terminal_table import print_table
from services.cli.trace_options import recipe_of, slo_of
from simulator.cluster.config import ClusterConfig
from simulator.cost.model import CostModel
from simulator.regret.plot import draw_regrets
from simulator.regret.rows import RegretReport
from simulator.regret.suite import KV, QUICK_SEEDS, SEEDS, OwnTrace, RegretSuite, own_trace, policies_of
from simulator.reproductions.measurement import Workload

MAX_QUEUED_REQUESTS = 1_000_000


def run_suite(
    options: dict[str, Any],
    policies: tuple[str, ...],
    *,
    data: Path,
    quick: bool,
    seeds: int | None,
    only: tuple[str, ...],
    journal: Path | None,
    processes: int,
    json_path: str | None,
    plot_path: Path | None,
) -> None:
    """Run the suite, of the options' own trace if they name one, and write its report. Raises
    `ConfigurationError` for a folder without traces, `TraceError` for a trace that cannot be read."""
    cluster = cluster_of(options)
    # A request that is refused would count as no latency at all.
    cluster = replace(cluster, instance=replace(cluster.instance, max_queued_requests=MAX_QUEUED_REQUESTS))
    cost = costs_of(options).create()
    own = None if options["trace"] is None else _own_trace(options, cluster, cost)
    with job_progress("regret") as on_done:
        report = RegretSuite(
            data,
            cluster,
            cost,
            policies or policies_of(quick),
            seeds or (QUICK_SEEDS if quick else SEEDS),
            quick,
            processes,
            on_done,
            only,
            journal=journal,
            own=own,
        ).run()
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
    if json_path == STDOUT:
        click.echo(encoded, nl=False)
    else:
        if json_path is not None:
            Path(json_path).write_bytes(encoded)
        print_table(_table(report))
    if plot_path is not None:
        draw_regrets(plot_path, report)


def _own_trace(options: dict[str, Any], cluster: ClusterConfig, cost: CostModel) -> OwnTrace:
    recipe, slo = recipe_of(options), slo_of(options)
    name = Path(recipe.source).name
    if (recipe.clip_start_s, recipe.clip_end_s) != (0.0, math.inf):
        name += f" {recipe.clip_start_s:g}:{recipe.clip_end_s:g} s"
    return own_trace(name, Workload(recipe, slo, options["max_requests"]), cluster, cost)


def _table(report: RegretReport) -> Table:
    """A row for each trace and load, a column for each policy, the least greatest regret first."""
    title = "regret: mean end-to-end latency above the best's, in %"
    table = Table("trace", "KV", "load", *report.max_regret, title=title)
    cells: dict[tuple[str, str, float], dict[str, str]] = {}
    for row in report.rows:
        interval = f" ±{100 * row.regret_interval:.0f}" if row.regret_interval else ""
        cells.setdefault((row.trace, row.kv, row.load), {})[row.policy] = f"{100 * row.regret:.0f}{interval}"
    for (trace, kv, load), of_policies in cells.items():
        table.add_row(trace, kv, f"{load:g}", *(of_policies[policy] for policy in report.max_regret))
    table.add_section()
    table.add_row("greatest", "", "", *(f"{100 * regret:.0f}" for regret in report.max_regret.values()))
    table.add_row("mean", "", "", *(f"{100 * report.mean_regret[policy]:.1f}" for policy in report.max_regret))
    table.caption = "\n".join(_sustained_line(report, trace) for trace in report.sustained_req_s)
    return table


def _sustained_line(report: RegretReport, trace: str) -> str:
    rates, bounds = report.sustained_req_s[trace], report.bound_req_s[trace]
    lmetric_req_s = rates[LMetric.name]
    gains = "; ".join(
        f"KV {kv} {rates[kv]:.3g} req/s, {rates[kv] / lmetric_req_s:.2f} of lmetric's with its own, "
        f"{rates[kv] / bounds[kv]:.2f} of the bound"
        for kv in KV
        if kv in rates
    )
    return f"{trace} sustained: {gains}"
