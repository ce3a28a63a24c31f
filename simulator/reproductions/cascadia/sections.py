"""The raw results as a page shows them."""

from collections.abc import Iterator, Sequence

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.parallelism import Mix
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cases import Case, Workload, reachable
from simulator.reproductions.cascadia.experiment import Measured
from simulator.reproductions.cascadia.setup import Size
from simulator.reproductions.cascadia.systems import ABLATIONS, COMPARED, SYSTEMS
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section
from simulator.reproductions.run import ReproductionRun


def sections_of(measured: Measured, run: ReproductionRun) -> tuple[Section, ...]:
    """Setup, then everything that was measured."""
    cases = (*measured.cases, *measured.other_cases)
    return (
        Section(title="Setup", markdown=_setup(measured, run)),
        Section(title="SLO scale at 95 % attainment", markdown=_scales(cases)),
        Section(title="Throughput", markdown=_throughputs(measured.cases, measured.size)),
        Section(title="Plans (tables 2 and 3)", markdown=_plans(cases)),
        Section(title="Drift", markdown=_drift(measured)),
        Section(title="Strategies (table 1 and figure 2)", markdown=_strategies(measured)),
    )


def _setup(measured: Measured, run: ReproductionRun) -> str:
    header = ("workload", "tiers", "scores of", "requests sampled", "mean scores", "best of any thresholds")
    rows = [_workload(workload) for workload in (*measured.traces.values(), *measured.others.values())]
    return "\n\n".join(
        [
            f"{setup.GPUS} H100s; a judgement takes {setup.JUDGE_S:g} s; each run has {measured.size.seconds:g} s of "
            f"Poisson arrivals (at most {measured.size.other_requests} requests on two tiers). Rates of traces 1 to 3: "
            f"{', '.join(f'{load:g}' for load in setup.LOADS)} of what the largest model alone holds on all GPUs. "
            f"Seed {run.seed}.",
            markdown_table(header, rows),
            _unreachable(measured),
        ]
    )


def _workload(workload: Workload) -> tuple[str, ...]:
    answers = workload.answers
    return (
        workload.name,
        ", ".join(model.model for model in workload.models),
        ", ".join(answers.stand_ins),
        str(len(answers.scores)),
        ", ".join(show(float(mean)) for mean in answers.scores.mean(axis=0)),
        show(reachable(answers)),
    )


def _unreachable(measured: Measured) -> str:
    missing = [
        f"{target:g} on {workload.name}"
        for workload in (*measured.traces.values(), *measured.others.values())
        for target in workload.targets
        if target > reachable(workload.answers)
    ]
    return f"Targets that no thresholds reach: {'; '.join(missing) or 'none of those asked for'}."


def _scales(cases: Sequence[Case]) -> str:
    header = ("workload", "target", "req/s", "SLO scale 1 (s)", "stand-alone", *SYSTEMS)
    rows = [
        (
            case.trace,
            show(case.quality),
            show(case.rate_per_s),
            show(case.alone_s),
            _alone(case),
            *(_scale(case, system) for system in SYSTEMS),
        )
        for case in cases
    ]
    return (
        "In brackets: p95 in s, and the mean score of the accepted answers in the run. A `*`: by its own tables the "
        "system does not hold this rate.\n\n" + markdown_table(header, rows)
    )


def _alone(case: Case) -> str:
    below = "" if case.stand_alone_quality >= case.quality else ", below the target"
    return f"tier {case.stand_alone_tier + 1} ({case.stand_alone_quality:.1f}{below})"


def _scale(case: Case, system: str) -> str:
    if system not in case.runs:
        return f"none: {case.refused[system]}"
    run = case.runs[system]
    mark = "" if run.deployed.is_within else " *"
    return f"{show(case.scale(system))} ({run.p95_s:.1f}, {run.quality:.1f}){mark}"


def _throughputs(cases: Sequence[Case], size: Size) -> str:
    saturated_at = ", ".join(f"{part:.0%}" for part in size.saturated_at)
    searched = [case for case in cases if case.sustained_per_s]
    in_time = [
        (case.trace, show(case.quality), *(show(case.sustained_per_s.get(system)) for system in COMPARED))
        for case in searched
    ]
    saturated = [
        (
            case.trace,
            show(case.quality),
            *(show(case.saturated_per_s.get(system)) for system in (*COMPARED, *ABLATIONS)),
        )
        for case in searched
    ]
    header = ("workload", "target")
    return "\n\n".join(
        [
            f"Requests/s with 95 % within {setup.FIXED_SLO_SCALE:g} times a single request's time; each rate is "
            "planned for.",
            markdown_table((*header, *COMPARED), in_time),
            "Saturated, in requests/s: the most that a system's deployments serve when more than they hold arrives, of "
            f"those that it makes for {saturated_at} of the highest rate which it holds by its own tables. No limit of "
            "latency.",
            markdown_table((*header, *COMPARED, *ABLATIONS), saturated),
        ]
    )


def _plans(cases: Sequence[Case]) -> str:
    header = (
        "workload",
        "target",
        "system",
        "thresholds",
        "shares",
        "expected quality",
        "replicas",
        "p95 of tiers (s)",
    )
    rows = [row for case in cases for row in _plan_rows(case)]
    return "Threshold none: the tier accepts nothing and is skipped.\n\n" + markdown_table(header, rows)


def _plan_rows(case: Case) -> Iterator[tuple[str, ...]]:
    for system, run in case.runs.items():
        deployed = run.deployed
        yield (
            case.trace,
            show(case.quality),
            system,
            ", ".join(_threshold(threshold) for threshold in deployed.thresholds),
            ", ".join(f"{share:.0%}" for share in deployed.shares),
            show(deployed.quality),
            "; ".join(_mix(mix) for mix in deployed.mixes),
            ", ".join(f"{tail:.1f}" for tail in run.tier_p95_s),
        )


def _threshold(threshold: float) -> str:
    return "none" if threshold > MAX_SCORE else f"{threshold:.0f}"


def _mix(mix: Mix) -> str:
    return " + ".join(f"{count} x ({shape})" for shape, count in mix) or "-"


def _drift(measured: Measured) -> str:
    header = ("rates", "target", "system", "new plans (minute: why)", "in time /s", "offered /s", "p95 (s)", "quality")
    rows = [
        (
            f"x {run.scale:g}",
            show(run.target),
            run.name,
            "; ".join(f"{at:.0f}: {why}" for at, why in run.switches) or "-",
            show(run.in_time_per_s),
            show(run.offered_per_s),
            show(run.p95_s),
            show(run.quality),
            ", ".join(f"{share:.0%}" for share in run.segment_in_time),
            ", ".join(show(quality) for quality in run.segment_quality),
        )
        for run in measured.drifted
    ]
    minutes = ", ".join(str(minute) for minute in setup.DRIFT_MINUTES)
    return (
        f"Traces 1, 2, 3 for {minutes} minutes of {measured.size.minute_s:g} s each; "
        f"{setup.WINDOW_REQUESTS} requests sampled each minute; a new plan serves {setup.SWITCH_MINUTES:g} minute "
        f"after it was made. In time: within {setup.FIXED_SLO_SCALE:g} times a single request's time on the first "
        "trace's stand-alone model.\n\n" + markdown_table((*header, "in time by trace", "quality by trace"), rows)
    )


def _strategies(measured: Measured) -> str:
    rows = [
        (each.model, str(each.strategy), str(each.output_tokens), show(each.per_s))
        for each in (*measured.table_1, *measured.figure_2)
    ]
    return markdown_table(("model", "(DP, TP, PP)", "output tokens", "req/s, saturated"), rows)
