"""What the regret suite has measured, as its table."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from simulator.report.interval import half_interval


class RunFigures(msgspec.Struct, frozen=True):
    """One simulation of the suite."""

    ttft_ms: float
    ttft_p95_ms: float
    tpot_ms: float
    tpot_p95_ms: float
    e2e_ms: float
    goodput_req_s: float


class Sustained(msgspec.Struct, frozen=True):
    """The highest rate that something sustains."""

    scale: float
    """In multiples of the trace's own rate."""
    req_s: float


class RegretRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy under one load of one trace; means over the seeds."""

    trace: str
    kv: str
    """`own`: instances compute what they have not cached. `brought`: they pull prefixes from each other and load them
    from their host's memory, too."""
    load: float
    """Share of the highest rate that the best policy sustains there, with KV got in the same way."""
    policy: str
    ttft_ms: float
    ttft_p95_ms: float
    tpot_ms: float
    tpot_p95_ms: float
    e2e_ms: float
    goodput: float
    """Requests per second that met the SLO."""
    regret: float
    """Its mean end-to-end latency over that of the best policy of this trace, way to get KV and load, less 1."""
    regret_interval: float
    """Half of the 95 % interval of the regret, by the differences to the best policy seed by seed; 0 for one seed."""


class RegretReport(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON form of the suite's result."""

    rows: tuple[RegretRow, ...]
    max_regret: dict[str, float]
    """By policy, least first."""
    mean_regret: dict[str, float]
    max_regret_of: dict[str, dict[str, float]]
    """The greatest by the way to get KV, then by policy."""
    sustained_req_s: dict[str, dict[str, float]]
    """By trace the highest rate that the best policy sustains, by the way to get KV; `lmetric`: that one, with its own
    KV."""
    bound_req_s: dict[str, dict[str, float]]
    """By trace what no schedule could exceed, with the memory of each way to get KV; `infinite`: with infinite
    caches."""
    seeds: int
    instances: int
    quick: bool


def rows_of(trace: str, load: float, figures: Mapping[str, Sequence[RunFigures]], kv: str = "own") -> list[RegretRow]:
    """The rows of one load; `figures` by policy, one for each seed and in the same order for all."""
    means = {policy: fmean(run.e2e_ms for run in runs) for policy, runs in figures.items()}
    best = min(means, key=lambda policy: means[policy])
    return [
        RegretRow(
            trace=trace,
            kv=kv,
            load=load,
            policy=policy,
            ttft_ms=fmean(run.ttft_ms for run in runs),
            ttft_p95_ms=fmean(run.ttft_p95_ms for run in runs),
            tpot_ms=fmean(run.tpot_ms for run in runs),
            tpot_p95_ms=fmean(run.tpot_p95_ms for run in runs),
            e2e_ms=means[policy],
            goodput=fmean(run.goodput_req_s for run in runs),
            regret=means[policy] / means[best] - 1,
            regret_interval=half_interval(
                [run.e2e_ms - other.e2e_ms for run, other in zip(runs, figures[best], strict=True)]
            )
            / means[best],
        )
        for policy, runs in figures.items()
    ]


def report_of(
    rows: Sequence[RegretRow],
    sustained_req_s: Mapping[str, Mapping[str, float]],
    bound_req_s: Mapping[str, Mapping[str, float]],
    *,
    seeds: int,
    instances: int,
    quick: bool,
) -> RegretReport:
    """All rows, and the greatest and the mean regret of each policy."""
    regrets: dict[str, list[float]] = {}
    for row in rows:
        regrets.setdefault(row.policy, []).append(row.regret)
    by_greatest = sorted(regrets, key=lambda policy: max(regrets[policy]))
    return RegretReport(
        rows=tuple(rows),
        max_regret={policy: max(regrets[policy]) for policy in by_greatest},
        mean_regret={policy: fmean(regrets[policy]) for policy in by_greatest},
        max_regret_of={
            kv: {policy: _greatest(rows, kv, policy) for policy in by_greatest}
            for kv in dict.fromkeys(row.kv for row in rows)
        },
        sustained_req_s={trace: dict(rates) for trace, rates in sustained_req_s.items()},
        bound_req_s={trace: dict(rates) for trace, rates in bound_req_s.items()},
        seeds=seeds,
        instances=instances,
        quick=quick,
    )


def _greatest(rows: Sequence[RegretRow], kv: str, policy: str) -> float:
    return max((row.regret for row in rows if (row.kv, row.policy) == (kv, policy)), default=0.0)
