"""`penstock reproduce star`: section 6 of STAR on modelled clusters, with an error model in the predictor's place."""

from collections.abc import Iterator, Sequence

from simulator.report.interval import Estimate
from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.page import markdown_table
from simulator.reproductions.report import Findings, Section
from simulator.reproductions.run import EngineEra, ReproductionRun
from simulator.reproductions.star.experiment import Reschedules, Rival
from simulator.reproductions.star.jobs import (
    SWEPT,
    Results,
    System,
    as_calls,
    experiments,
    scale_key,
    small_key,
    with_seeds,
)
from simulator.reproductions.star.lengths import servegen_workload
from simulator.reproductions.star.rows import COMPARED, all_rows
from simulator.reproductions.star.setups import FULL, QUICK, SMALL_STRESS, Plan

SERVEGEN_FILE = "traces/servegen_deepseek-r1.jsonl.gz"
SWEEP_PLOT, TRACES_PLOT, SCALE_PLOT = "figure_10_small.png", "figures_11_12.png", "figure_13.png"
ERAS_PLOT = "eras.png"
IN_BOTH_ERAS: tuple[System, ...] = (*Reschedules, Rival.TRAJECTORIES, Rival.TRAJECTORIES_ORACLE)
"""Of the plot."""

SETUP = """
- Clusters: 1 prefill and 3 decode instances on RTX 4090D with R1-Distill-Qwen-7B in 8 bit, and 2 + 6 on H800 with
  Qwen3-14B; step times and KV memory by the roofline model of the catalogue. Prefill instances
  transfer to the decode instance whose KV memory is emptiest (all systems), over 200 Gbit/s links; figure 13 has
  25 Gbit/s and the small cluster's devices, a quarter of them for prefill.
- Arrivals are a Poisson process; each length is drawn by itself. Throughput and goodput count what ended within the
  time of the arrivals, percentiles every request. SLO: TTFT 1 s, TPOT 25 ms (small) and 50 ms (large).
- OOM events are preemptions on decode instances: the KV memory was full and a request lost its own.
- Variance of execution time: of the decode instances' mean step times over each second, averaged over the seconds in
  which all decode.
- vLLM: no rescheduling. w/o prediction: mode `current`. w/ prediction: mode `predicted`, remaining lengths by the error
  model, asked every 20 steps, 1.40 ms of the step in which it is asked spread evenly. Oracle: the same with the truth.
- The rescheduler is the live one (`controlplane/policies/rescheduling`) with its defaults: theta 0.1, 32 points of 256
  tokens, decay 0.95, one migration at a time, decided every second. The paper gives none of these.
"""
ERAS = {
    EngineEra.CURRENT: "- Engines admit a request where its whole prompt fits, as vLLM does by default now.\n",
    EngineEra.VLLM_0_9: "- Engines admit a request where its first chunk fits, as vLLM 0.9 does.\n",
}
BOTH_ERAS = """
The small cluster at every rate, under either admission: that of the paper's vLLM 0.9, where a request comes in as soon
as its first chunk fits, and today's, where its whole prompt must. Means over seeds with half of their 95 % interval.
"of w/o" is a system's P99 TPOT or goodput over that of STAR without prediction on equal requests. The trajectories are
Penstock's own rule and know what steps cost.
"""
PAIRS = """
In how many pairs of runs with equal requests, at all rates, the first system is better than the second; in brackets
those in which they are equal.
"""
READINGS = """
- Algorithm 1 compares w_i (line 14) and N_i (line 15) with one mean: beta is normalised to sum 1, so that both are
  tokens.
- Line 21 is read over the horizon: the target must hold what it has and the request at every point until the request
  ends, within 95 % of its memory. As printed it adds the remaining length only and leaves the request's present context
  out.
- Equation (4) is what a migration is chosen by: the variance now once, and that of the horizon once in all.
- Without prediction there is no remaining length: line 20 filters nothing.
"""


def reproduce(run: ReproductionRun) -> Findings:
    """All runs, rows and plots. Raises `ConfigurationError` without the data, `TraceError` for data of another form."""
    plan = QUICK if run.quick else FULL
    servegen = servegen_workload(run.data_file(SERVEGEN_FILE))
    jobs = with_seeds(experiments(plan, servegen, run.seed, run.engine_era), plan.seeds)
    results = Results(run.run_jobs(as_calls(jobs)))
    _plot(run, results, plan)
    return Findings(
        rows=all_rows(results, plan, run.engine_era),
        sections=(
            Section(title="Setup", markdown=SETUP + _seeds(plan) + ERAS[run.engine_era]),
            Section(title="Readings of Algorithm 1", markdown=READINGS),
            Section(
                title="How much it matters under 2025's admission and under today's",
                markdown=f"{BOTH_ERAS}\n{both_eras(results, plan)}\n{PAIRS}\n{pair_by_pair(results, plan)}",
            ),
        ),
        plots=(SWEEP_PLOT, TRACES_PLOT, SCALE_PLOT, ERAS_PLOT),
    )


def both_eras(results: Results, plan: Plan) -> str:
    """The table of the small cluster at every rate, under either admission."""
    header = ("admission", "req/s", "system", "P99 TPOT ms", "of w/o", "goodput req/s", "of w/o")
    return markdown_table((*header, "preemptions", "moved", "variance ms^2"), _rows_of_both_eras(results, plan))


def _rows_of_both_eras(results: Results, plan: Plan) -> Iterator[tuple[str, ...]]:
    for era in EngineEra:
        for rate in plan.sweep:
            for system in SWEPT:
                key, other = (small_key(each, rate, era) for each in (system, Reschedules.CURRENT))
                yield (
                    era,
                    f"{rate:g}",
                    system,
                    _shown(results.figure(key, "p99_tpot_ms"), 1),
                    _shown(results.ratio([(key, other)], "p99_tpot_ms"), 2),
                    _shown(results.figure(key, "goodput_req_s"), 4),
                    _shown(results.ratio([(key, other)], "goodput_req_s"), 2),
                    *(f"{results.mean(key, what):.3g}" for what in ("preemptions", "moved", "exec_variance_ms2")),
                )


def pair_by_pair(results: Results, plan: Plan) -> str:
    """The table of how often one system is better than another on equal requests."""
    header = ("admission", "system", "better than", "P99 TPOT lower", "goodput higher", "pairs")
    return markdown_table(header, _rows_of_pairs(results, plan))


def _rows_of_pairs(results: Results, plan: Plan) -> Iterator[tuple[str, ...]]:
    for era in EngineEra:
        for ours, theirs in COMPARED:
            tails, goodputs = (
                [
                    pair
                    for rate in plan.sweep
                    for pair in results.pairs(small_key(ours, rate, era), small_key(theirs, rate, era), what)
                ]
                for what in ("p99_tpot_ms", "goodput_req_s")
            )
            lower, higher = sum(one < other for one, other in tails), sum(one > other for one, other in goodputs)
            counts = (_of_pairs(lower, tails), _of_pairs(higher, goodputs))
            yield era, ours, theirs, *counts, str(len(tails))


def _of_pairs(better: int, pairs: Sequence[tuple[float, float]]) -> str:
    equal = sum(one == other for one, other in pairs)
    return f"{better} ({equal})" if equal else str(better)


def _shown(estimate: Estimate, digits: int) -> str:
    if estimate.mean is None:
        return "-"
    return f"{estimate.mean:.{digits}f}" + (f" +- {estimate.half:.{digits}f}" if estimate.half else "")


def _seeds(plan: Plan) -> str:
    seeds = f"means of {plan.seeds} seeds, which give all systems equal requests" if plan.seeds > 1 else "one seed"
    return (
        f"- Arrivals over {plan.seconds:g} s ({plan.scale_seconds:g} s for figure 13), then until the last answer; "
        f"{seeds}.\n"
    )


def _plot(run: ReproductionRun, results: Results, plan: Plan) -> None:
    metrics = (
        ("throughput_req_s", "throughput (req/s)"),
        ("goodput_req_s", "goodput (req/s)"),
        ("p99_tpot_ms", "P99 TPOT (ms)"),
    )
    panels = [
        Panel(
            "small cluster, ShareGPT",
            "requests per second",
            label,
            _lines(results, plan, tuple(Reschedules), run.engine_era, what),
            is_y_log=what == "p99_tpot_ms",
        )
        for what, label in metrics
    ]
    draw_lines(run.plots / SWEEP_PLOT, panels)
    eras = [
        Panel(
            era.admission,
            "requests per second",
            label,
            _lines(results, plan, IN_BOTH_ERAS, era, what),
            is_y_log=what == "p99_tpot_ms",
        )
        for what, label in metrics[:0:-1]
        for era in EngineEra
    ]
    draw_lines(run.plots / ERAS_PLOT, eras)
    firsts = {
        str(system): results.first(small_key(system, SMALL_STRESS, run.engine_era)).series for system in Reschedules
    }
    traces = [
        Panel(
            f"{SMALL_STRESS:g} req/s",
            "seconds",
            label,
            {name: list(zip(series.times_s, getattr(series, what), strict=True)) for name, series in firsts.items()},
            limits,
            is_y_log=what == "variances_ms2",
        )
        for what, label, limits in (
            ("variances_ms2", "variance of execution time (ms^2)", {}),
            ("fullest", "KV memory held, fullest decode instance", {"99 %": 0.99}),
        )
    ]
    draw_lines(run.plots / TRACES_PLOT, traces)
    scale = Panel(
        "25 Gbit/s",
        "instances",
        "variance of execution time (ms^2)",
        {
            str(system): [
                (float(size), results.mean(scale_key(system, size), "exec_variance_ms2")) for size in plan.scale_sizes
            ]
            for system in Reschedules
        },
        is_x_log=True,
        is_y_log=True,
    )
    draw_lines(run.plots / SCALE_PLOT, [scale])


def _lines(
    results: Results, plan: Plan, systems: Sequence[System], era: EngineEra, what: str
) -> dict[str, list[tuple[float, float]]]:
    return {
        str(system): [(rate, results.mean(small_key(system, rate, era), what)) for rate in plan.sweep]
        for system in systems
    }
