"""Cascadia's plans beside those of the paper's case studies: tables 2 and 3, and figure 8."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.parallelism import Mix
from simulator.reproductions.cascadia import explanations
from simulator.reproductions.cascadia.cases import Case
from simulator.reproductions.cascadia.run import Run
from simulator.reproductions.cascadia.systems import CASCADIA
from simulator.reproductions.cascadia.workload import TRACES
from simulator.reproductions.page import markdown_table
from simulator.reproductions.report import ReportRow


@dataclass(frozen=True, slots=True)
class PublishedPlan:
    """A row of table 2 with its row of table 3."""

    thresholds: tuple[float, float]
    shares: tuple[float, float, float]
    """The parts of the requests that reach each tier."""
    gpus: tuple[int, int, int]
    strategies: tuple[str, str, str]


PUBLISHED: Mapping[tuple[float, str], PublishedPlan] = {
    (90.0, TRACES[0]): PublishedPlan(
        (99, 91), (1.0, 0.94, 0.5), (4, 8, 20), ("DP=4", "DP=2, TP=4", "TP=4, PP=3 + TP=8")
    ),
    (85.0, TRACES[0]): PublishedPlan(
        (74, 64), (1.0, 0.62, 0.21), (4, 12, 16), ("DP=2, TP=2", "DP=6, TP=2", "DP=2, TP=8")
    ),
    (80.0, TRACES[0]): PublishedPlan(
        (69, 25), (1.0, 0.54, 0.11), (6, 14, 12), ("DP=6", "DP=5, TP=2 + TP=4", "TP=4, PP=3")
    ),
    (80.0, TRACES[1]): PublishedPlan((61, 18), (1.0, 0.31, 0.03), (8, 16, 8), ("DP=6 + TP=2", "DP=8, TP=2", "TP=8")),
    (80.0, TRACES[2]): PublishedPlan(
        (32, 0), (1.0, 0.23, 0.0), (18, 14, 0), ("DP=10 + DP=4, TP=2", "DP=2, TP=4 + DP=3, TP=2", "-")
    ),
    (70.0, TRACES[2]): PublishedPlan((10, 0), (1.0, 0.05, 0.0), (24, 8, 0), ("DP=16 + DP=4, TP=2", "DP=4, TP=2", "-")),
}
"""By target and trace."""


def published_cases(cases: Sequence[Case]) -> tuple[tuple[PublishedPlan, Case], ...]:
    """The cases of the paper's studies that were measured, in its order."""
    found = {(case.quality, case.trace): case for case in cases if CASCADIA in case.runs}
    return tuple((plan, found[key]) for key, plan in PUBLISHED.items() if key in found)


def balance(run: Run) -> tuple[float, ...]:
    """Each reached tier's p95 over that of the slowest; 0 where no request goes."""
    tails_s = run.mean_tier_p95_s
    return tuple(tail_s / max(tails_s) for tail_s in tails_s)


def plan_rows(cases: Sequence[Case]) -> Iterator[ReportRow]:
    """Means over the cases of the studies: who reaches which tier, who gets the GPUs, how balanced the tiers are."""
    both = published_cases(cases)
    for tier in (1, 2):
        yield ReportRow(
            claim=f"table 2: share of the requests that reach tier {tier + 1}, mean of {len(both)} cases",
            paper=100 * _mean(plan.shares[tier] for plan, _ in both),
            ours=100 * _mean(case.runs[CASCADIA].deployed.shares[tier] for _, case in both),
            unit="%",
            why=explanations.SHARES,
        )
    for tier in range(3):
        yield ReportRow(
            claim=f"table 2: GPUs of tier {tier + 1}, mean of {len(both)} cases",
            paper=_mean(float(plan.gpus[tier]) for plan, _ in both),
            ours=_mean(float(gpus_of(case.runs[CASCADIA].deployed.mixes[tier])) for _, case in both),
            unit="GPUs",
            why=explanations.GPUS,
        )
    yield ReportRow(
        claim=f"figure 8: p95 of the fastest tier over that of the slowest, mean of {len(both)} cases",
        paper="balanced",
        ours=_mean(min(part for part in balance(case.runs[CASCADIA]) if part) for _, case in both),
        unit="1: balanced",
        why=explanations.BALANCE,
    )


def published_table(cases: Sequence[Case]) -> str:
    """Tables 2 and 3 with ours below each row."""
    rows: list[tuple[str, ...]] = []
    for plan, case in published_cases(cases):
        deployed = case.runs[CASCADIA].deployed
        named = f"({case.quality:g}, {1 + TRACES.index(case.trace)})"
        rows.append(
            (
                named,
                "paper",
                ", ".join(f"{threshold:g}" for threshold in plan.thresholds),
                _percent(plan.shares),
                ", ".join(map(str, plan.gpus)),
                "; ".join(plan.strategies),
                "-",
            )
        )
        rows.append(
            (
                named,
                "ours",
                ", ".join(threshold_in_words(threshold) for threshold in deployed.thresholds),
                _percent(deployed.shares),
                ", ".join(str(gpus_of(mix)) for mix in deployed.mixes),
                "; ".join(mix_in_words(mix) for mix in deployed.mixes),
                ", ".join(f"{part:.2f}" for part in balance(case.runs[CASCADIA])),
            )
        )
    header = ("case", "", "thresholds", "shares", "GPUs", "replicas", "p95 of tiers over the slowest (figure 8)")
    return markdown_table(header, rows)


def gpus_of(mix: Mix) -> int:
    """All GPUs of the replicas."""
    return sum(shape.gpus * count for shape, count in mix)


def mix_in_words(mix: Mix) -> str:
    """The replicas, e.g. `2 x (TP=4) + 1 x (TP=8)`."""
    return " + ".join(f"{count} x ({shape})" for shape, count in mix) or "-"


def threshold_in_words(threshold: float) -> str:
    """None: the tier accepts nothing and is skipped."""
    return "none" if threshold > MAX_SCORE else f"{threshold:.0f}"


def _percent(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.0%}" for share in shares)


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))
