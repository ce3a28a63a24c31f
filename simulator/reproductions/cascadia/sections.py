"""The raw results as a page shows them."""

from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from simulator.report.interval import Estimate
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cases import Case
from simulator.reproductions.cascadia.drift import Drifted, by_system
from simulator.reproductions.cascadia.experiment import Measured
from simulator.reproductions.cascadia.plans import mix_in_words, published_table, threshold_in_words
from simulator.reproductions.cascadia.systems import ABLATIONS, CASCADIA, COMPARED, SARATHI, SYSTEMS
from simulator.reproductions.cascadia.workload import Workload
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section
from simulator.reproductions.run import ReproductionRun


def sections_of(measured: Measured, run: ReproductionRun) -> tuple[Section, ...]:
    """Setup, then everything that was measured."""
    cases = (*measured.cases, *measured.other_cases)
    return (
        Section(title="Setup", markdown=_setup(measured, run)),
        Section(title="SLO scale at 95 % attainment", markdown=_scales(cases)),
        Section(title="Throughput", markdown=_throughputs(measured.cases)),
        Section(title="Plans beside tables 2 and 3, and figure 8", markdown=published_table(measured.cases)),
        Section(title="All plans", markdown=_plans(cases)),
        Section(title="Drift", markdown=_drift(measured)),
        Section(title="Strategies (table 1 and figure 2)", markdown=_strategies(measured)),
    )


def _setup(measured: Measured, run: ReproductionRun) -> str:
    header = ("workload", "tiers", "scores of", "requests sampled", "mean scores", "best of any thresholds")
    rows = [_workload(workload) for workload in (*measured.traces.values(), *measured.others.values())]
    return "\n\n".join(
        [
            f"{setup.GPUS} H100s; a judgement takes {setup.JUDGE_S:g} s; replicas of a tier are chosen by the mesh's "
            f"default policy, for all systems. Each case is run with {measured.size.seeds} seeds, from {run.seed} on, "
            f"of {measured.size.seconds:g} s of Poisson arrivals (at most {measured.size.other_requests} requests on "
            "two tiers); intervals are of 95 %, of the mean over seeds. Rates of traces 1 to 3: "
            f"{', '.join(f'{load:g}' for load in setup.LOADS)} of what the largest model alone holds on all GPUs. "
            f"Throughput is searched with one seed.",
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
        show(workload.reachable),
    )


def _unreachable(measured: Measured) -> str:
    missing = [
        f"{target:g} on {workload.name}"
        for workload in (*measured.traces.values(), *measured.others.values())
        for target in (measured.size.targets if workload.name in measured.traces else measured.size.other_targets)
        if target not in workload.targets
    ]
    return f"Targets that no thresholds reach: {'; '.join(missing) or 'none of those asked for'}."


def _scales(cases: Sequence[Case]) -> str:
    names = (*SYSTEMS, SARATHI)
    header = ("workload", "target", "req/s", "SLO scale 1 (s)", "stand-alone", *names)
    rows = [
        (
            case.trace,
            show(case.quality),
            show(case.rate_per_s),
            show(case.alone_s),
            _alone(case),
            *(_scale(case, system) for system in names),
        )
        for case in cases
    ]
    return (
        "With half of the 95 % interval over the seeds; in brackets: p95 in s, and the mean score of the accepted "
        "answers. A `*`: by its own tables the system does not hold this rate.\n\n" + markdown_table(header, rows)
    )


def _alone(case: Case) -> str:
    below = "" if case.stand_alone_quality >= case.quality else ", below the target"
    return f"tier {case.stand_alone_tier + 1} ({case.stand_alone_quality:.1f}{below})"


def _scale(case: Case, system: str) -> str:
    if system not in case.systems:
        return "-"
    run = case.systems[system].run
    if run is None:
        return f"none: {case.systems[system].refused}"
    scale = case.scale(system)
    mark = "" if run.deployed.is_within else " *"
    return f"{show(scale.mean)} ± {scale.half:.2g} ({fmean(run.p95_s):.1f}, {fmean(run.quality):.1f}){mark}"


def _throughputs(cases: Sequence[Case]) -> str:
    searched = [case for case in cases if case.is_searched(CASCADIA)]
    rivals = (*COMPARED, SARATHI)
    in_time = [
        (case.trace, show(case.quality), *(show(case.result(system).sustained_per_s) for system in rivals))
        for case in searched
    ]
    all_of_them = (*rivals, *ABLATIONS)
    saturated = [
        (case.trace, show(case.quality), *(show(case.result(system).saturated_per_s) for system in all_of_them))
        for case in searched
    ]
    header = ("workload", "target")
    return "\n\n".join(
        [
            f"Requests/s with 95 % within {setup.FIXED_SLO_SCALE:g} times a single request's time; each rate is "
            "planned for.",
            markdown_table((*header, *rivals), in_time),
            "Saturated, in requests/s: what a system's deployment for the highest rate that it holds by its own "
            "tables serves while its queues never empty; its slowest tier decides. No limit of latency.",
            markdown_table((*header, *all_of_them), saturated),
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
            ", ".join(threshold_in_words(threshold) for threshold in deployed.thresholds),
            ", ".join(f"{share:.0%}" for share in deployed.shares),
            show(deployed.quality),
            "; ".join(mix_in_words(mix) for mix in deployed.mixes),
            ", ".join(f"{tail:.1f}" for tail in run.mean_tier_p95_s),
        )


def _drift(measured: Measured) -> str:
    header = (
        "target",
        "a minute (s)",
        "system",
        "rates",
        "offered /s",
        "in time /s",
        "p95 (s)",
        "quality",
        "new plans (minute: why)",
    )
    rows = [_drift_row(runs) for runs in by_system(measured.drifted).values()]
    minutes = ", ".join(str(minute) for minute in setup.DRIFT_MINUTES)
    return (
        f"Traces 1, 2, 3 for {minutes} minutes. Each system gets the traces' own rates times {setup.DRIFT_LOAD:g} of "
        "the most at which it sustains every trace by itself (see Throughput); Cascadia with its first plan kept gets "
        "what Cascadia gets. A minute is as long as the table says; "
        f"{setup.WINDOW_REQUESTS} requests sampled each minute; a new plan serves {setup.SWITCH_MINUTES:g} minute "
        f"after it was made. In time: within {setup.FIXED_SLO_SCALE:g} times a single request's time on the trace's "
        "stand-alone model. New plans are those of the first seed.\n\n"
        + markdown_table((*header, "in time by trace", "quality by trace"), rows)
    )


def _drift_row(runs: Sequence[Drifted]) -> tuple[str, ...]:
    first = runs[0]
    return (
        show(first.target),
        show(first.minute_s),
        first.name,
        f"x {show(first.scale)}",
        show(first.offered_per_s),
        _over_seeds([run.in_time_per_s for run in runs]),
        _over_seeds([run.p95_s for run in runs]),
        show(fmean(run.quality for run in runs)),
        "; ".join(f"{at:.0f}: {why}" for at, why in first.switches) or "-",
        ", ".join(f"{share:.0%}" for share in np.mean([run.segment_in_time for run in runs], axis=0)),
        ", ".join(show(float(mean)) for mean in np.mean([run.segment_quality for run in runs], axis=0)),
    )


def _over_seeds(values: Sequence[float]) -> str:
    estimate = Estimate.of(values)
    return f"{show(estimate.mean)} ± {estimate.half:.2g}"


def _strategies(measured: Measured) -> str:
    rows = [
        (each.model, str(each.strategy), str(each.output_tokens), show(each.per_s))
        for each in (*measured.table_1, *measured.figure_2)
    ]
    return markdown_table(("model", "(DP, TP, PP)", "output tokens", "req/s, saturated"), rows)
