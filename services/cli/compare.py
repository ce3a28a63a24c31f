"""`penstock compare`: several placement policies on the same trace and the same simulated mesh."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from controlplane.policies.registry import POLICIES
from services.cli.console.output import console_option, write_console
from services.cli.report_output import check_outputs, output_options, print_notices, write_reports
from services.cli.simulation.options import cluster_options, plan_of, read_requests
from services.cli.simulation.parallel_runs import simulate_in_parallel
from services.cli.simulation.plan import ConsoleChoice, SimulationPlan
from services.cli.simulation.progress import progress_bars
from services.cli.simulation.regret import run_suite
from services.cli.simulation.run import load_rows
from services.cli.trace_options import optional_trace_options, slo_of
from services.frontend.console.recorded import MAX_RECORDING_BYTES
from simulator.cache_bound import cache_bound
from simulator.fluid_bound import fluid_bound
from simulator.regret.suite import INSTANCES, QUICK_INSTANCES
from simulator.report.plot import draw_comparison
from simulator.report.report import Report, summarise
from simulator.traces.request import TraceRequest
from simulator.traces.source import SYNTHETIC

EXIT_ERRORS = 1
BUSY_SCALE = 2.5
"""Of the synthetic conversations, for each instance: for the default kind some three quarters of what is sustained."""

TRACE_SHAPES = (
    "part", "clip", "copies", "length_scale", "max_requests", "shared_prefix", "prefix_groups", "slo_ttft_ms",
    "slo_tpot_ms",
)  # fmt: skip
"""Options that say what is replayed of a trace, and what its requests ask for."""


@click.command()
@optional_trace_options
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
@click.option(
    "--suite",
    type=click.Choice(["regret"]),
    help="Many traces and loads in place of one, or many loads of --trace: how much worse than the best each policy is "
    "(docs/policies.md).",
)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Of a suite: folder of the data sets, with traces/ in it.",
)
@click.option("--quick", is_flag=True, help="Of a suite: four traces, shorter, on 8 instances, eight policies.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), show_default="5, with --quick 2", help="Of a suite: runs of each."
)
@click.option("--only", multiple=True, metavar="TRACE", help="Of a suite: a trace of it, by name; repeatable.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Of a suite: file that results are added to as they come; those that it has are not run again.",
)
@cluster_options
@output_options
@console_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    processes: int,
    suite: str | None,
    data: Path | None,
    quick: bool,
    seeds: int | None,
    only: tuple[str, ...],
    journal: Path | None,
    json_path: str | None,
    plot_path: Path | None,
    console_path: Path | None,
    **options: Any,
) -> None:
    """Run several policies on the same trace and simulated mesh, in parallel, and show their reports side by side.

    The JSON form is {"reports": {POLICY: REPORT}, "loads": {POLICY: LOAD}, "offered_req_s", "fluid_bound_req_s",
    "cache_bound_req_s", "offered_share"}; the bounds are rates that no policy could exceed, with infinite caches and
    with those of this mesh (docs/simulation.md). That of --suite regret is {"rows":
    [{"trace", "kv", "load", "policy", "ttft_ms", "tpot_ms", "e2e_ms", "goodput", "regret"}],
    "max_regret": {POLICY: SHARE}} and more.
    Exit status: 0 done, 1 some requests failed, 2 used wrongly.
    """
    check_outputs(json_path, plot_path, console_path)
    if suite is None:
        if data is not None or quick or seeds is not None or only or journal is not None:
            raise click.UsageError("--data, --quick, --seeds, --only and --journal are of --suite")
        reports = _compare(ctx, options, policies, settings, processes, json_path, plot_path, console_path)
        ctx.exit(EXIT_ERRORS if any(report.errors for report in reports.values()) else 0)
    if console_path is not None:
        raise click.UsageError("--console is of one trace: leave out --suite")
    _check_suite(ctx, data, only, options)
    if not _is_given(ctx, "instances"):
        options["instances"] = QUICK_INSTANCES if quick else INSTANCES
    run_suite(
        options,
        policies,
        data=data or Path(),
        quick=quick,
        seeds=seeds,
        only=only,
        journal=journal,
        processes=processes,
        json_path=json_path,
        plot_path=plot_path,
    )


def _compare(
    ctx: click.Context,
    options: dict[str, Any],
    policies: tuple[str, ...],
    settings: tuple[str, ...],
    processes: int,
    json_path: str | None,
    plot_path: Path | None,
    console_path: Path | None,
) -> dict[str, Report]:
    """By policy, all on one trace; printed and written as asked for."""
    if options["trace"] is None:
        options["trace"] = SYNTHETIC
        if not _is_given(ctx, "rate_scale"):
            options["rate_scale"] = options["instances"] * BUSY_SCALE
    slo, title = slo_of(options), Path(options["trace"]).name
    plans = _plans(options, policies or POLICIES.usable(), settings)
    if console_path is not None:
        share = MAX_RECORDING_BYTES // len(plans)
        plans = {policy: replace(plan, console=ConsoleChoice(policy, slo, share)) for policy, plan in plans.items()}
    plan = next(iter(plans.values()))
    requests = read_requests(plan)
    bounds = Bounds.of(requests, plan)
    with progress_bars(plans, len(requests)) as show:
        runs = simulate_in_parallel(plans, min(processes, len(plans)), show)
    reports = {
        policy: summarise(run.outcomes, slo, policy=policy, seed=options["seed"]) for policy, run in runs.items()
    }
    document = {"reports": reports, "loads": {policy: run.load for policy, run in runs.items()}, **bounds.as_json}
    encoded = msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    write_reports(reports, encoded, json_path, {policy: load_rows(run.load) for policy, run in runs.items()})
    print_notices([str(bounds)])
    if plot_path is not None:
        outcomes = {policy: run.outcomes for policy, run in runs.items()}
        draw_comparison(plot_path, outcomes, {policy: run.curve for policy, run in runs.items()}, slo, title=title)
    if console_path is not None:
        recorded = [run.recorded for run in runs.values() if run.recorded is not None]
        write_console(console_path, title, recorded, is_simulated=True)
    return reports


@dataclass(frozen=True, slots=True)
class Bounds:
    """Rates that no policy could exceed, beside what is offered; requests per second."""

    offered: float
    with_infinite_caches: float
    with_these_caches: float

    @staticmethod
    def of(requests: Sequence[TraceRequest], plan: SimulationPlan) -> "Bounds":
        costs = plan.costs.create()
        return Bounds(
            _offered_req_s(requests),
            fluid_bound(requests, plan.cluster, costs).requests_per_s,
            cache_bound(requests, plan.cluster, costs).requests_per_s,
        )

    @property
    def offered_share(self) -> float:
        """Of what any schedule could serve."""
        return self.offered / self.with_these_caches

    @property
    def as_json(self) -> dict[str, float]:
        """As the JSON form has them."""
        return {
            "offered_req_s": self.offered,
            "fluid_bound_req_s": self.with_infinite_caches,
            "cache_bound_req_s": self.with_these_caches,
            "offered_share": self.offered_share,
        }

    def __str__(self) -> str:
        return (
            f"offered: {self.offered:,.2f} requests/s, {self.offered_share:.2f} of what any schedule "
            f"could serve with this memory for KV ({self.with_these_caches:,.2f}; with infinite caches "
            f"{self.with_infinite_caches:,.2f})"
        )


def _plans(options: dict[str, Any], policies: Sequence[str], settings: Sequence[str]) -> dict[str, SimulationPlan]:
    """One for each policy."""
    _check_settings(settings, policies)
    return {policy: plan_of(options, policy, _settings_of(policy, settings)) for policy in policies}


def _check_suite(ctx: click.Context, data: Path | None, only: tuple[str, ...], options: dict[str, Any]) -> None:
    """A suite has either its own traces or that of --trace, and searches for the loads itself."""
    given = [option for option in ("rate_scale", *TRACE_SHAPES) if _is_given(ctx, option)]
    if options["trace"] is None:
        if data is None:
            raise click.UsageError(
                "--suite needs --data: the folder of the data sets, with traces/ in it; or --trace: one of your own"
            )
        if given:
            raise click.UsageError(
                f"--suite without --trace has its own traces and loads: leave out {', '.join(given)}"
            )
        return
    if data is not None or only:
        raise click.UsageError("--suite is of the traces of --data and --only or of that of --trace, not of both")
    if "rate_scale" in given:
        raise click.UsageError("--suite searches for the loads itself: leave out rate_scale")
    if None in (options["slo_ttft_ms"], options["slo_tpot_ms"]):
        raise click.UsageError(
            "--suite with --trace needs --slo-ttft-ms and --slo-tpot-ms: loads are shares of the rate at which 90 % of "
            "the requests meet both"
        )


def _is_given(ctx: click.Context, option: str) -> bool:
    return ctx.get_parameter_source(option) is not ParameterSource.DEFAULT


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
