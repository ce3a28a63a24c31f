"""`penstock plan`: how many GPUs, in which shapes, each tier of a cascade gets, and which answers are accepted."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from controlplane.model.cascade_goal import judgement_s, quality_refusal
from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult
from controlplane.planning.cascade.labels import with_labels
from controlplane.planning.cascade.observed import summary_of_sample
from controlplane.planning.cascade.plan import CascadePlan, cascade_plan, decode_plan, encode_plan
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import pareto_front
from controlplane.planning.cascade.workload import WorkloadWindow, read_window, sample_of_window
from controlplane.planning.instance_profile import InstanceProfile
from mesh.errors import ConfigurationError, TraceError
from services.cli.finite_range import FiniteRange
from services.cli.planning import live
from services.cli.planning.export import compose_override, helm_values, judges_for
from services.cli.planning.goal_options import judge_gpu_option, latency_options, probability_option
from services.cli.planning.pareto_plot import draw_pareto_front
from services.cli.planning.plan_table import plan_table
from services.cli.planning.tables_file import read_tables, write_tables
from services.cli.profiling.profile_file import read_profile
from services.cli.report_output import STDOUT, check_outputs, print_notices
from services.cli.terminal_table import print_table
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.make_plan import parse_tier, profile_keys
from simulator.cascade.steady_plan import SimulatedDeployments, steady_plan
from simulator.cascade.tier import Tier


@click.group()
def command() -> None:
    """Plan models, GPUs and thresholds of a cascade."""


@command.command("cascade")
@click.option(
    "--workload",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Sampled requests with their judge scores on every tier (docs/cascade.md has the form).",
)
@click.option("--gpus", type=click.IntRange(1, 4096), required=True, help="Of all tiers together.")
@click.option("--quality", type=FiniteRange(0, 100), help="Hold this mean quality as fast as possible.")
@probability_option
@latency_options
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    required=True,
    metavar="[NAME=]MODEL@DEVICE[:DTYPE]|NAME=profile:FILE[,FILE...]",
    help="One for each model of the workload, smallest first; MODEL and DEVICE as in the catalogue, NAME as clients "
    "and the workload call it; of several FILEs each is the profile of another shape of replica.",
)
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What people, or anybody else, say of the workload's answers: lines of "
    '{"request_id": "...", "quality": [0, 100]}, one quality for each tier, null where nobody says.',
)
@click.option("--rate", type=FiniteRange(min=0, min_open=True), help="Requests/s, instead of the workload's.")
@click.option(
    "--judge",
    default="",
    help="Whose scores the workload has, as in `penstock cascade set`: the plan is applied to no cascade with another "
    "judge, and the planner compares what comes with this workload.  [default: as the workload says]",
)
@click.option(
    "--judge-s",
    type=FiniteRange(min=0),
    help="One judgement takes.  [default: 0 with --judge confidence or exact, else 1]",
)
@judge_gpu_option
@click.option(
    "--cascade", "name", default="penstock-cascade", show_default=True, help="The virtual model that it is a plan of."
)
@click.option(
    "--tables",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep simulated latency tables in this file, and use those it has: the next plan takes seconds.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the simulations.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the plan as JSON; - prints it instead of the table.",
)
@click.option(
    "--plot",
    "plot_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw latency against quality of all routings that were looked at, as a PNG.",
)
def cascade(
    workload: Path,
    tiers: tuple[str, ...],
    labels: Path | None,
    tables: Path | None,
    json_path: str | None,
    plot_path: Path | None,
    **options: Any,
) -> None:
    """Choose thresholds, GPUs and replicas for a cascade of models.

    Latencies come from simulations of every shape of replica under the load that the thresholds leave it. Exit status:
    0 planned, 1 no plan meets what was asked, 2 used wrongly.
    """
    check_outputs(json_path, plot_path)
    window, sample = _workload(workload, labels, options["rate"])
    names, judge = window.models, options["judge"] or window.judge
    if refusal := quality_refusal(judge, sample.quality is not None):
        raise ConfigurationError(refusal)
    of_tiers = [_named_tier(text, options["gpus"]) for text in tiers]
    if tuple(name for name, _ in of_tiers) != names:
        raise click.UsageError(
            f"the workload has scores for {', '.join(names)}: give --tier for these, in this order "
            f"(NAME=MODEL@DEVICE where the names differ), not for {', '.join(name for name, _ in of_tiers)}"
        )
    request = PlanRequest(
        gpus=options["gpus"],
        quality=options["quality"],
        latency_s=options["latency_s"],
        judge_s=judgement_s(judge) if options["judge_s"] is None else options["judge_s"],
        minimise=options["minimise"],
        judge_gpu_s=options["judge_gpu_s"],
    )
    known = read_tables(tables)
    console = Console(stderr=True)
    with console.status("simulating replicas") as status:
        curves = SimulatedCurves(
            sample,
            [model for _, model in of_tiers],
            seed=options["seed"],
            known=known,
            # How many tables the search needs is known when it ends, so no estimate can be given.
            on_curve=lambda key: status.update(
                f"table {curves.simulated + 1}: simulating {key.rsplit('/', 2)[0].replace('/', ', ')}"
            ),
        )
        started_s = time.perf_counter()
        deployments = SimulatedDeployments(
            sample,
            [model for _, model in of_tiers],
            curves,
            request.judge_s,
            options["seed"],
            on_deployment=lambda number: status.update(f"deployment {number}: simulating it as a whole"),
        )
        found = steady_plan(
            sample, curves, deployments, request, options["probability"], window.label or judge, options["seed"]
        )
        planned = found.result
        seconds = time.perf_counter() - started_s
    write_tables(tables, curves.measured)
    made = cascade_plan(
        options["name"],
        names,
        planned,
        rate_per_s=sample.rate_per_s,
        gpus=request.gpus,
        quality_target=request.quality,
        latency_target_s=request.latency_s,
        promise=found.promise,
        calibrations=sample.calibrations(),
        steady=found.steady,
    )
    if judge:
        made = msgspec.structs.replace(made, judge=judge, workload=summary_of_sample(sample, planned.thresholds))
    print_notices([f"planned in {seconds:.1f} s, {curves.simulated} tables simulated, {len(planned.scores)} rounds"])
    _write(made, planned, json_path, plot_path)


@command.command("export")
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--format", "form", type=click.Choice(["compose", "helm"]), required=True)
@click.option(
    "--judge",
    "judges",
    multiple=True,
    help="Of the cascade, as in `penstock cascade set`; repeatable.  [default: the one that the plan names]",
)
def export(plan: Path, form: str, judges: tuple[str, ...]) -> None:
    """Print the plan in the file PLAN as a Compose file to go with deploy/compose.yaml, or as Helm values. Either one
    runs the planned replicas and sets the cascade up."""
    made = decode_plan(plan.read_bytes())
    try:
        judges = judges_for(made, judges)
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--judge") from error
    click.echo(compose_override(made, judges) if form == "compose" else helm_values(made, judges), nl=False)


for _live in (live.goal, live.show, live.apply):
    command.add_command(_live)


def _workload(path: Path, labels: Path | None, rate_per_s: float | None) -> tuple[WorkloadWindow, CascadeSample]:
    try:
        with path.open("rb") as lines:
            window = read_window(lines)
    except (TraceError, ConfigurationError) as error:
        raise click.BadParameter(str(error), param_hint="--workload") from error
    if labels is not None:
        try:
            with labels.open("rb") as lines:
                window = with_labels(window, lines, labels.name)
        except TraceError as error:
            raise click.BadParameter(str(error), param_hint="--labels") from error
    if rate_per_s is not None:
        window = replace(window, rate_per_s=rate_per_s)
    try:
        return window, sample_of_window(window)
    except (TraceError, ConfigurationError) as error:
        raise click.BadParameter(str(error), param_hint="--workload") from error


def _write(made: CascadePlan, planned: PlanResult, json_path: str | None, plot_path: Path | None) -> None:
    if plot_path is not None:
        draw_pareto_front(plot_path, planned.points, pareto_front(planned.points), made)
    if json_path == STDOUT:
        click.echo(encode_plan(made))
        return
    if json_path is not None:
        Path(json_path).write_bytes(encode_plan(made) + b"\n")
    print_table(plan_table(made))


def _profiles_in(text: str) -> dict[str, InstanceProfile]:
    """The profiles in the files that `profile:FILE[,FILE...]` names. Raises `ConfigurationError`."""
    return {path: read_profile(Path(path)) for path in profile_keys(text)}


def _named_tier(text: str, gpus: int) -> tuple[str, Tier]:
    """(name, model on its device), in replicas of at most `gpus`, of --tier: [NAME=]MODEL@DEVICE[:DTYPE], or
    NAME=profile:FILE[,FILE...]. Raises `click.BadParameter`."""
    name, equals, rest = text.partition("=")
    if not equals:
        name, rest = "", text
    try:
        tier = parse_tier(rest, gpus, _profiles_in(rest))
    except ConfigurationError as error:
        raise click.BadParameter(str(error), param_hint="--tier") from error
    return name or rest.partition("@")[0], tier
