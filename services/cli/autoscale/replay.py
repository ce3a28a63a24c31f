"""`penstock autoscale replay`: what the autoscaler would have done, what it would have cost, and what rivals would."""

import gzip
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any, TextIO

import click
import msgspec
import numpy as np
from rich.table import Table

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import MAX_REPLICAS, ReplicaKind
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.cascade.replica import ReplicaShape
from mesh.errors import ConfigurationError, TraceError
from services.cli.autoscale.kinds_option import kinds_option
from services.cli.finite_range import POSITIVE, FiniteRange
from services.cli.profiling.profile_file import read_profile
from services.cli.report_output import STDOUT, check_outputs
from services.cli.terminal_table import print_table
from simulator.autoscale.arrivals import (
    Workload,
    arrivals_of_rates,
    is_rates_header,
    lengths_of_cdf,
    workload_of_requests,
)
from simulator.autoscale.curve import SloLimits, capacity_curve
from simulator.autoscale.mesh import StartUp
from simulator.autoscale.mixed import ReplayedMix, alone, replay_mix
from simulator.autoscale.replay import STEP_S, Replayed, Span, best_with_hindsight, cheapest_target, replay
from simulator.autoscale.scalers import ManagerScaler, QueueScaler, Scaler, UtilisationScaler
from simulator.cascade.make_plan import parse_tier
from simulator.cascade.tier import MAX_REPLICA_GPUS, ReplicaModel
from simulator.traces.source import TraceRecipe, open_trace

POOL = 8
"""Replicas that are simulated together for the curve: many equal ones even out what a single one cannot."""
UTILISATION_TARGETS = (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
QUEUE_PARTS = (0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9)
"""Of the requests that are under way on a replica at its capacity."""
MIX = "mix"
PENSTOCK, QUEUE, UTILISATION, HINDSIGHT = "penstock", "queue (KEDA)", "utilisation (HPA)", "hindsight"


class ReplayReport(msgspec.Struct, frozen=True):
    """What `--json` writes."""

    capacity_per_s: float
    curve: dict[str, Any]
    policy: AutoscalePolicy
    cold_start_s: float
    drain_s: float
    targets: dict[str, float]
    """Of the rivals: chosen by the history."""
    days: tuple[dict[str, Any], ...]
    """For each counted day, by scaler: `Replayed`."""


class MixReport(msgspec.Struct, frozen=True):
    """What `--json` writes with `--kind`."""

    policy: AutoscalePolicy
    cold_start_s: float
    drain_s: float
    days: tuple[dict[str, Any], ...]
    """For each counted day, `ReplayedMix` of the mix and of each kind alone."""


@click.command("replay")
@click.option(
    "--trace",
    required=True,
    help="A trace of requests as `penstock simulate` takes it, or rates in CSV: minute_since_start, req_per_min_low, "
    "req_per_min_mid, req_per_min_high (also .gz).",
)
@click.option(
    "--lengths",
    "lengths_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="With rates: distributions of lengths in CSV: field (input, output), cdf_percent, tokens (also .gz).",
)
@click.option(
    "--replica",
    required=True,
    metavar="MODEL@DEVICE[:DTYPE]|profile:FILE",
    help="One replica: of the catalogue, in the shape of --tp, or as profiled.",
)
@click.option("--tp", type=click.IntRange(1, 8), default=1, show_default=True, help="GPUs of a replica.")
@click.option("--slo-ttft-ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option("--slo-tpot-ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option("--slo-e2e-ms", type=POSITIVE, help="Limit of the SLO; default: none.")
@click.option(
    "--share", type=FiniteRange(0.5, 0.9999), default=0.99, show_default=True, help="Of requests within the SLO."
)
@click.option("--cold-start-s", type=POSITIVE, default=180.0, show_default=True, help="Of a replica, for everybody.")
@click.option("--drain-s", type=FiniteRange(0), default=30.0, show_default=True, help="Of a replica, for everybody.")
@click.option("--minimum", type=click.IntRange(1, MAX_REPLICAS), default=1, show_default=True, help="Replicas.")
@click.option("--maximum", type=click.IntRange(1, MAX_REPLICAS), default=64, show_default=True, help="Replicas.")
@click.option(
    "--history-s",
    type=FiniteRange(0),
    default=86_400.0,
    show_default=True,
    help="Of the trace: not counted, since the manager learns from it and the rivals' targets are chosen by it.",
)
@kinds_option
@click.option("--budget-per-hour", type=FiniteRange(0), help="Of all replicas; goes with --kind. Default: no bound.")
@click.option("--policy", default="least_loaded", show_default=True, help="Placement policy of the simulated replicas.")
@click.option(
    "--requests", type=click.IntRange(200, 100_000), default=3000, show_default=True, help="Simulated at each rate."
)
@click.option(
    "--tables",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the simulated curve in this file, and use the one it has.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of all that is drawn.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="Write the report as JSON; - prints it instead of the table.",
)
def replay_command(
    trace: str,
    lengths_path: Path | None,
    replica: str,
    tp: int,
    cold_start_s: float,
    drain_s: float,
    history_s: float,
    tables: Path | None,
    seed: int,
    json_path: str | None,
    kinds: tuple[str, ...],
    budget_per_hour: float | None,
    **options: Any,
) -> None:
    """Run the autoscaler's own manager over a trace, beside rivals and the least that hindsight would have paid.

    A queue-length rival (as KEDA) and a utilisation rival (as the horizontal pod autoscaler) get the target that keeps
    the SLO at the least cost over the history. Costs are replica-hours, paid from the order to the end of the drain.

    With --kind instead: the cheapest mix of these, beside each kind alone. What --replica does at a part of its
    capacity stands for every kind at that part of its own.
    """
    check_outputs(json_path, None)
    limits = SloLimits(options["slo_ttft_ms"], options["slo_tpot_ms"], options["slo_e2e_ms"])
    policy = AutoscalePolicy(
        "replayed",
        limits.ttft_ms,
        limits.tpot_ms,
        limits.e2e_ms,
        share=options["share"],
        minimum=options["minimum"],
        maximum=options["maximum"],
        cold_start_s=cold_start_s,
        gpus=1 if kinds else tp,
        kinds=tuple(ReplicaKind.read(each) for each in kinds),
        budget_per_hour=inf if budget_per_hour is None else budget_per_hour,
    ).checked()
    workload = _workload(trace, lengths_path, seed)
    model = _replica(replica, tp)
    curve = _read_curve(tables)
    if curve is None:
        curve = capacity_curve(
            model,
            workload.lengths,
            limits,
            pool=POOL,
            requests=options["requests"],
            policy=options["policy"],
            seed=seed,
        )
        if tables is not None:
            tables.write_bytes(msgspec.json.encode(asdict(curve)))
    times = StartUp(cold_start_s, drain_s)
    report: ReplayReport | MixReport
    if kinds:
        report = _mix_report(policy, curve, workload, times, history_s)
    else:
        report = _report(policy, curve, workload, times, history_s)
    document = msgspec.json.format(msgspec.json.encode(report)) + b"\n"
    if json_path == STDOUT:
        click.echo(document, nl=False)
        return
    if json_path is not None:
        Path(json_path).write_bytes(document)
    print_table(_mix_table(report) if isinstance(report, MixReport) else _table(report))


def _report(
    policy: AutoscalePolicy, curve: CapacityCurve, workload: Workload, times: StartUp, history_s: float
) -> ReplayReport:
    """Raises `ConfigurationError` where nothing is left to count, or no replica holds the SLO."""
    capacity, spans = _counted(policy, curve, workload, history_s)
    arrivals, start = workload.arrivals, spans[0].start
    history = Span(0, start)
    share, bounds = policy.share, (policy.minimum, policy.maximum)
    at_capacity = curve.in_flight_at(capacity)

    def by_queue(part: float) -> Scaler:
        return QueueScaler(part * at_capacity, *bounds)

    def by_utilisation(target: float) -> Scaler:
        return UtilisationScaler(target, *bounds)

    part, target = QUEUE_PARTS[0], UTILISATION_TARGETS[0]
    if start:
        part = cheapest_target(QUEUE_PARTS, by_queue, arrivals, history, curve, times, share)
        target = cheapest_target(UTILISATION_TARGETS, by_utilisation, arrivals, history, curve, times, share)
    scalers = {PENSTOCK: ManagerScaler(policy, curve), QUEUE: by_queue(part), UTILISATION: by_utilisation(target)}
    found = {name: replay(arrivals, spans, curve, times, share, scaler) for name, scaler in scalers.items()}
    found[HINDSIGHT] = tuple(
        best_with_hindsight(arrivals, span, curve, times, share, policy.minimum, policy.maximum) for span in spans
    )
    return ReplayReport(
        capacity,
        asdict(curve),
        policy,
        times.cold_start_s,
        times.drain_s,
        {QUEUE: part * at_capacity, UTILISATION: target},
        tuple({name: asdict(days[number]) for name, days in found.items()} for number in range(len(spans))),
    )


def _counted(
    policy: AutoscalePolicy, curve: CapacityCurve, workload: Workload, history_s: float
) -> tuple[float, tuple[Span, ...]]:
    """What a replica sustains, and the days that count. Raises `ConfigurationError` as `_report` does."""
    capacity = curve.capacity_per_s(policy.share)
    if capacity <= 0:
        raise ConfigurationError(
            "no replica of this kind holds the SLO, however few its requests: allow more time, or take a larger one"
        )
    arrivals, start = workload.arrivals, round(history_s / STEP_S)
    day = round(86_400 / STEP_S)
    if start >= len(arrivals):
        raise ConfigurationError(
            f"the trace ends within its history of {history_s:g} s: give a longer one or a smaller --history-s"
        )
    return capacity, tuple(Span(at, min(at + day, len(arrivals))) for at in range(start, len(arrivals), day))


def _mix_report(
    policy: AutoscalePolicy, curve: CapacityCurve, workload: Workload, times: StartUp, history_s: float
) -> MixReport:
    """Raises `ConfigurationError` as `_report` does."""
    _, spans = _counted(policy, curve, workload, history_s)
    found = {
        name: replay_mix(workload.arrivals, spans, curve, times, each)
        for name, each in {MIX: policy, **alone(policy)}.items()
    }
    days = tuple({name: asdict(days[number]) for name, days in found.items()} for number in range(len(spans)))
    return MixReport(policy, times.cold_start_s, times.drain_s, days)


def _mix_table(report: MixReport) -> Table:
    table = Table(title=f"{report.cold_start_s:g} s until a replica serves")
    for name in ("day", "of", "cost", "replica-hours by kind", "within the SLO", "changes"):
        table.add_column(name, justify="left" if name in ("day", "of", "replica-hours by kind") else "right")
    for number, day in enumerate(report.days, start=1):
        for name, entry in day.items():
            found = ReplayedMix(**entry)
            hours = ", ".join(f"{kind}: {each:.1f}" for kind, each in found.hours.items())
            kept = f"{100 * found.kept_share:.2f} %"
            table.add_row(str(number), name, f"{found.cost:.1f}", hours, kept, str(found.changes))
    return table


def _table(report: ReplayReport) -> Table:
    title = (
        f"a replica sustains {report.capacity_per_s:.3g} requests/s; {report.cold_start_s:g} s until one serves; "
        f"rivals' targets: {report.targets[QUEUE]:.3g} requests, {100 * report.targets[UTILISATION]:.0f} % used"
    )
    table = Table(title=title)
    for name in ("day", "by", "replica-hours", "of hindsight", "within the SLO", "replicas", "changes"):
        table.add_column(name, justify="left" if name in ("day", "by") else "right")
    for number, day in enumerate(report.days, start=1):
        least = day[HINDSIGHT]["replica_hours"]
        for name, entry in day.items():
            found = Replayed(**entry)
            table.add_row(
                str(number),
                name,
                f"{found.replica_hours:.1f}",
                f"{found.replica_hours / least:.3f}",
                f"{100 * found.kept_share:.2f} %",
                f"{found.least} to {found.most}",
                str(found.changes),
            )
    return table


def _replica(text: str, tp: int) -> ReplicaModel:
    """Raises `ConfigurationError`."""
    kind, _, path = text.partition(":")
    if kind == "profile":
        profile = read_profile(Path(path))
        tier = parse_tier(f"profile:{profile.name}", MAX_REPLICA_GPUS, {profile.name: profile})
        return tier.replicas()[0]
    replicas = parse_tier(text, MAX_REPLICA_GPUS).replicas()
    found = next((each for each in replicas if each.shape == ReplicaShape(tp, 1)), None)
    if found is None:
        raise ConfigurationError(
            f"{text} does not fit on {tp} GPUs; it does as {', '.join(str(each.shape) for each in replicas)}"
        )
    return found


def _workload(trace: str, lengths_path: Path | None, seed: int) -> Workload:
    """Raises `TraceError` and `ConfigurationError`."""
    rng = np.random.default_rng(seed)
    path = Path(trace)
    if path.is_file():
        with _text(path) as lines:
            if is_rates_header(lines.readline()):
                lines.seek(0)
                if lengths_path is None:
                    raise ConfigurationError(f"{trace} has rates only: give the lengths of requests with --lengths")
                try:
                    arrivals = arrivals_of_rates(lines, STEP_S, rng)
                except TraceError as error:
                    raise TraceError(f"{trace}: {error}") from error
                with _text(lengths_path) as text:
                    return Workload(arrivals, lengths_of_cdf(text, rng))
    if lengths_path is not None:
        raise ConfigurationError(f"--lengths goes with rates, and {trace} has requests with lengths of their own")
    return workload_of_requests(open_trace(TraceRecipe(trace, seed=seed)), STEP_S)


def _text(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _read_curve(path: Path | None) -> CapacityCurve | None:
    """Raises `ConfigurationError` for a file that holds something else."""
    if path is None or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=CapacityCurve)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{path} holds no capacity curve ({error}): choose another file") from error
