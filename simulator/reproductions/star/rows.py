"""Compares STAR's published figures with ours, a row for each claim."""

from collections.abc import Iterator

import numpy as np

from simulator.report.interval import Estimate
from simulator.reproductions.report import Figure, ReportRow
from simulator.reproductions.run import EngineEra
from simulator.reproductions.star import explanations
from simulator.reproductions.star.experiment import Reschedules, Rival
from simulator.reproductions.star.jobs import (
    LONG_INTERVAL_S,
    SERVEGEN_RATE,
    SEVERAL,
    SEVERAL_INSTANCES,
    Results,
    System,
    large_key,
    scale_key,
    small_key,
)
from simulator.reproductions.star.lengths import ALPACA, SHAREGPT, Workload
from simulator.reproductions.star.setups import (
    LARGE_RATE,
    LARGE_STRESS,
    SCALE_RATE_PER_INSTANCE,
    SMALL_RATE,
    SMALL_STRESS,
    Plan,
)
from simulator.rescheduling.remaining_lengths import Figure7Errors

VLLM, CURRENT, PREDICTED, ORACLE = Reschedules
COMPARED: tuple[tuple[System, System], ...] = (
    (CURRENT, VLLM),
    (PREDICTED, VLLM),
    (PREDICTED, CURRENT),
    (PREDICTED, ORACLE),
    (Rival.TRAJECTORIES, VLLM),
    (Rival.TRAJECTORIES, CURRENT),
    (Rival.TRAJECTORIES, PREDICTED),
    (Rival.TRAJECTORIES, Rival.TRAJECTORIES_ORACLE),
)
"""Systems whose ratios say how much rescheduling, and how much prediction, matters."""


def all_rows(results: Results, plan: Plan, era: EngineEra) -> tuple[ReportRow, ...]:
    """All rows, in the order of the paper; `era` is that of all runs but those that compare the eras."""
    return (
        *_lengths(),
        *_predictor(),
        *_large(results),
        *_small(results, plan, era),
        *_balance(results, era),
        *_scale(results, plan),
        *_bins(results),
        *_intervals(results),
        *_eras(results, plan),
        *_observations(results, era),
    )


def _row(claim: str, paper: Figure, ours: Estimate, unit: str, why: str) -> ReportRow:
    return ReportRow(claim=claim, paper=paper, ours=ours.mean, unit=unit, why=why, interval=ours.half)


def _lengths() -> Iterator[ReportRow]:
    shares = (np.arange(100_000) + 0.5) / 100_000
    published: tuple[tuple[Workload, tuple[float, ...]], ...] = (
        (SHAREGPT, (7542, 12008, 1536, 32670, 32679)),
        (ALPACA, (8596, 13354, 987, 32690, 32691)),
    )
    for workload, figures in published:
        lengths = workload.outputs.at(shares)
        ours = (lengths.mean(), lengths.std(), *np.percentile(lengths, (50, 90, 95)))
        for name, paper, mine in zip(("mean", "std", "P50", "P90", "P95"), figures, ours, strict=True):
            yield ReportRow(
                claim=f"table 2: output length of {workload.name}, {name}",
                paper=float(paper),
                ours=float(mine),
                unit="tokens",
                why=explanations.LENGTHS if name in ("mean", "std") else "",
            )


def _predictor() -> Iterator[ReportRow]:
    keys = np.arange(20_000, dtype=np.uint64)
    total = np.full(20_000, 31_000, dtype=np.int64)
    for generated, paper in ((0, 18_256.0), (8_000, 2_929.0)):
        done = np.full(20_000, generated, dtype=np.int64)
        error = np.abs(Figure7Errors(0).predict(keys, done, total) - (total - done))
        yield ReportRow(
            claim=f"figure 7: MAE after {generated} tokens of requests of 30-32K (our error model, not a predictor)",
            paper=paper,
            ours=float(error.mean()),
            unit="tokens",
            why=explanations.ERRORS,
        )


def _large(results: Results) -> Iterator[ReportRow]:
    published = {
        VLLM: (0.107, 0.102, 39.57),
        CURRENT: (0.145, 0.142, 31.72),
        PREDICTED: (0.159, 0.157, 26.49),
        ORACLE: (None, None, None),
    }
    names = (("throughput", "throughput_req_s", "req/s"), ("goodput", "goodput_req_s", "req/s"))
    metrics = (*names, ("P99 TPOT", "p99_tpot_ms", "ms"))
    for rate, is_stress in ((LARGE_RATE, False), (LARGE_STRESS, True)):
        for at, (label, what, unit) in enumerate(metrics):
            for system, figures in published.items():
                yield _row(
                    f"figure 10: large cluster, ShareGPT, {rate:g} req/s, {label}, {system}",
                    None if is_stress else figures[at],
                    results.figure(large_key(system, rate), what),
                    unit,
                    explanations.LARGE_STRESS if is_stress else explanations.LARGE,
                )


def _small(results: Results, plan: Plan, era: EngineEra) -> Iterator[ReportRow]:
    for rate, is_stress in ((SMALL_RATE, False), (SMALL_STRESS, True)):
        for system, paper in ((VLLM, 96.3), (CURRENT, 28.3), (PREDICTED, 24.3), (ORACLE, None)):
            yield _row(
                f"figure 10: small cluster, ShareGPT, {rate:g} req/s, P99 TPOT, {system}",
                None if is_stress else paper,
                results.figure(small_key(system, rate, era), "p99_tpot_ms"),
                "ms",
                explanations.SMALL_STRESS if is_stress else explanations.SMALL,
            )
    tails = {
        rate: 1
        - results.mean(small_key(PREDICTED, rate, era), "p99_tpot_ms")
        / results.mean(small_key(VLLM, rate, era), "p99_tpot_ms")
        for rate in plan.sweep
    }
    best = max(tails, key=lambda rate: tails[rate])
    yield ReportRow(
        claim=f"abstract: P99 TPOT below vLLM's, best rate of the small cluster's sweep (ours: {best:g} req/s)",
        paper=75.1,
        ours=100 * tails[best],
        unit="%",
        why=explanations.TAIL,
    )
    ratios = {
        rate: results.mean(small_key(PREDICTED, rate, era), "goodput_req_s")
        / max(results.mean(small_key(VLLM, rate, era), "goodput_req_s"), 1e-9)
        for rate in plan.sweep
    }
    best = max(ratios, key=lambda rate: ratios[rate])
    yield ReportRow(
        claim=f"abstract: goodput over vLLM's, best rate of the small cluster's sweep (ours: {best:g} req/s)",
        paper=2.63,
        ours=ratios[best],
        unit="x",
        why=explanations.GOODPUT,
    )


def _balance(results: Results, era: EngineEra) -> Iterator[ReportRow]:
    for rate in (SMALL_RATE, SMALL_STRESS):
        for system in Reschedules:
            paper = 0.78 if system is PREDICTED and rate == SMALL_RATE else None
            yield _row(
                f"figure 11: small cluster, {rate:g} req/s, variance of execution time, {system}",
                paper,
                results.figure(small_key(system, rate, era), "exec_variance_ms2"),
                "ms^2",
                explanations.VARIANCE,
            )
        said: dict[Reschedules, float | str] = {VLLM: "repeated", CURRENT: "few", PREDICTED: 0.0, ORACLE: 0.0}
        for system in Reschedules:
            key = small_key(system, rate, era)
            share = results.mean(key, "full_share")
            yield _row(
                f"figure 12: small cluster, {rate:g} req/s, OOM events (preemptions), {system}",
                said[system],
                results.figure(key, "preemptions"),
                "events",
                f"{100 * share:.1f} % of the time above 99 % of KV memory. {explanations.OOM}",
            )


def _scale(results: Results, plan: Plan) -> Iterator[ReportRow]:
    for instances in plan.scale_sizes:
        for system in Reschedules:
            yield _row(
                f"figure 13: {instances} instances, {SCALE_RATE_PER_INSTANCE * instances:g} req/s, 25 Gbit/s, "
                f"variance of execution time, {system}",
                None,
                results.figure(scale_key(system, instances), "exec_variance_ms2"),
                "ms^2",
                explanations.SCALE,
            )


def _bins(results: Results) -> Iterator[ReportRow]:
    published = {
        "Full": (0.163, 26.49, 0.157),
        "6-bin": (0.188, 26.91, 0.155),
        "4-bin": (0.220, 27.70, 0.148),
        "2-bin": (0.302, 31.47, 0.142),
        "No pred.": (0.322, 31.72, 0.142),
    }
    keys = {"Full": large_key(PREDICTED, LARGE_STRESS), "No pred.": large_key(CURRENT, LARGE_STRESS)}
    for name, figures in published.items():
        key = keys.get(name, f"bins {name}")
        yield from _table(results, f"table 3: {name}", key, figures, explanations.BINS)


def _intervals(results: Results) -> Iterator[ReportRow]:
    published = {1: (0.237, 27.84, 0.148), 20: (0.163, 26.49, 0.157), 100: (0.242, 29.43, 0.145)}
    for every, figures in published.items():
        key = large_key(PREDICTED, LARGE_STRESS) if every == 20 else f"every {every}"
        yield from _table(results, f"table 4: predicted every {every} iterations", key, figures, explanations.INTERVALS)


def _table(
    results: Results, claim: str, key: str, figures: tuple[float, float, float], reason: str
) -> Iterator[ReportRow]:
    metrics = (
        ("variance of execution time", "exec_variance_ms2", "ms^2"),
        ("P99 TPOT", "p99_tpot_ms", "ms"),
        ("goodput", "goodput_req_s", "req/s"),
    )
    for (label, what, unit), paper in zip(metrics, figures, strict=True):
        yield _row(f"{claim}, {label}", paper, results.figure(key, what), unit, reason)


def _eras(results: Results, plan: Plan) -> Iterator[ReportRow]:
    for era in EngineEra:
        for what, label in (("p99_tpot_ms", "P99 TPOT"), ("goodput_req_s", "goodput")):
            for ours, theirs in COMPARED:
                pairs = [(small_key(ours, rate, era), small_key(theirs, rate, era)) for rate in plan.sweep]
                yield _row(
                    f"small cluster, {era.admission}, all rates, {label}, {ours} over {theirs}",
                    None,
                    results.ratio(pairs, what),
                    "x",
                    explanations.ERAS,
                )


def _observations(results: Results, era: EngineEra) -> Iterator[ReportRow]:
    for name, rate in (("alpaca", SMALL_RATE), ("servegen", SERVEGEN_RATE)):
        for system in Reschedules:
            key = f"{name} {system}"
            yield _observation(results, key, f"small cluster, {name} lengths, {rate:g} req/s, P99 TPOT", "p99_tpot_ms")
            yield _observation(results, key, f"small cluster, {name} lengths, {rate:g} req/s, OOM", "preemptions")
    for system in Reschedules:
        claim = f"small cluster, ShareGPT, {SMALL_STRESS:g} req/s, P50 TPOT"
        yield _observation(results, small_key(system, SMALL_STRESS, era), claim, "p50_tpot_ms")
        claim = f"small cluster, ShareGPT, {SMALL_STRESS:g} req/s, goodput"
        yield _observation(results, small_key(system, SMALL_STRESS, era), claim, "goodput_req_s")
    for system in (CURRENT, PREDICTED, ORACLE):
        for what in ("exec_variance_ms2", "preemptions", "moved"):
            claim = f"small cluster, {SMALL_STRESS:g} req/s, rescheduled every {LONG_INTERVAL_S:g} s, {what}"
            yield _observation(results, f"slow {system}", claim, what)
    for system in (CURRENT, PREDICTED):
        claim = f"{SEVERAL_INSTANCES} instances, up to {SEVERAL} migrations an interval instead of one, variance"
        yield _observation(results, f"several {system}", claim, "exec_variance_ms2")


def _observation(results: Results, key: str, claim: str, what: str) -> ReportRow:
    units = {"exec_variance_ms2": "ms^2", "p99_tpot_ms": "ms", "p50_tpot_ms": "ms", "goodput_req_s": "req/s"}
    unit = units.get(what, "events")
    system = next(system for system in Reschedules if key.endswith(f" {system}"))
    return _row(f"{claim}, {system}", None, results.figure(key, what), unit, explanations.OURS)
