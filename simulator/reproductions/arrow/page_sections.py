"""The raw results as a page shows them."""

from collections.abc import Mapping

from simulator.reproductions.arrow import setup
from simulator.reproductions.arrow.experiment import HOST_STEP_MS, LOW_LOAD_RATE, OVERLOAD, SCALING_TRACE, Measured
from simulator.reproductions.arrow.explanations import sustained_point
from simulator.reproductions.measurement import LoadPoint, SustainedLoad
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section
from simulator.reproductions.run import ReproductionRun
from simulator.reproductions.sustainable_rate import TARGET_ATTAINMENT

_LATENCY_HEADER = ("P90 TTFT ms there", "P90 TPOT ms there", "runs")


def sections_of(measured: Measured, run: ReproductionRun) -> tuple[Section, ...]:
    """Setup, then everything that was measured."""
    return (
        Section(title="Setup", markdown=_setup(run)),
        *(
            Section(title=f"{trace.name}: sustainable rates", markdown=_rates(measured, trace.name))
            for trace in setup.TRACES
        ),
        *(
            Section(title=f"{name}: with {HOST_STEP_MS:g} ms a step on the host", markdown=_host_rates(rates))
            for name, rates in measured.host_bound.items()
        ),
        Section(title="Minimal load and round robin at equal rates", markdown=_sweeps(measured)),
        Section(title=f"{SCALING_TRACE.name}: numbers of GPUs", markdown=_scaling(measured)),
        Section(
            title=f"Arrow's attainment at {LOW_LOAD_RATE:g} x its sustainable rate, by low_load",
            markdown=_low_loads(measured),
        ),
        Section(title=f"Arrow at {OVERLOAD:g} times its sustainable rate", markdown=_overload(measured)),
    )


def _setup(run: ReproductionRun) -> str:
    instance = setup.fleet_of(setup.GPUS, run.seed).cluster.instance
    lines = [
        f"- {setup.MODEL} on {setup.GPUS} {setup.DEVICE}, by the roofline cost model; steps of at most "
        f"{instance.max_step_tokens} tokens and {instance.max_batch_requests} requests, "
        f"KV blocks of {setup.BLOCK_TOKENS} tokens, no prefix caching.",
        f"- KV between instances: {setup.NVLINK_GIB_PER_S:g} GiB/s one way, {setup.LINK.latency_ms:g} ms, "
        f"{setup.LINK.max_parallel} transfers at once, first come, first served; requests pause for it.",
        f"- A rate is sustainable if {TARGET_ATTAINMENT:.0%} of all requests meet both SLOs. Rates multiply the "
        "arrival times of the trace; the search is a bisection.",
    ]
    for trace in setup.TRACES:
        ttft_ms, tpot_ms = trace.slo.ttft_ms or 0.0, trace.slo.tpot_ms or 0.0
        clip = f", its first {trace.clip_end_s:g} s" if trace.clip_end_s < float("inf") else ""
        count = f", of these the first {trace.quick_requests} requests" if run.quick else ""
        lines.append(f"- {trace.name}: `{trace.file}`{clip}{count}; TTFT {ttft_ms / 1000:g} s, TPOT {tpot_ms:g} ms.")
    curve = setup.curve_of(setup.fleet_of(setup.GPUS, run.seed))
    lines.append(
        f"- TTFT curve of a single-GPU instance, fitted to its profile: {curve.fixed_ms:.3g} ms + "
        f"{1000 * curve.token_ms:.3g} us x tokens + {1e6 * curve.token_squared_ms:.3g} ns x tokens^2."
    )
    return "\n".join(lines)


def _rates(measured: Measured, trace: str) -> str:
    bounds = measured.fluid_bounds[trace]
    header = ("system", "sustainable requests/s", "served requests/s there", "fluid bound", *_LATENCY_HEADER)
    rows = []
    for name, load in measured.rates[trace].items():
        at = sustained_point(load)
        served = show(at.report.throughput_req_s) if at else "-"
        rows.append((name, _rate(load), served, show(bounds[name]), *_latencies(load)))
    return markdown_table(header, rows)


def _host_rates(rates: Mapping[str, SustainedLoad]) -> str:
    header = ("system", "sustainable requests/s", *_LATENCY_HEADER)
    return markdown_table(header, [(name, _rate(load), *_latencies(load)) for name, load in rates.items()])


def _rate(load: SustainedLoad) -> str:
    return "none" if load.req_s is None else show(load.req_s) + (" or more" if load.found.is_bound else "")


def _latencies(load: SustainedLoad) -> tuple[str, str, str]:
    at = sustained_point(load)
    ttft_ms = show(at.report.ttft_ms.p90) if at else "-"
    tpot_ms = show(at.report.tpot_ms.p90) if at else "-"
    return (ttft_ms, tpot_ms, str(len(load.points)))


def _sweeps(measured: Measured) -> str:
    rows = []
    for trace in setup.TRACES:
        sweeps = measured.sweeps[trace.name]
        for minimal, in_turn in zip(sweeps[setup.MINIMAL_LOAD], sweeps[setup.ROUND_ROBIN], strict=True):
            rows.append(
                (trace.name, show(minimal.offered_req_s), f"{minimal.attainment:.1%}", f"{in_turn.attainment:.1%}")
            )
    return markdown_table(("trace", "requests/s", "minimal load", "round robin"), rows)


def _scaling(measured: Measured) -> str:
    arrow, minimal = measured.scaling[setup.ARROW], measured.scaling[setup.MINIMAL_LOAD]
    at = markdown_table(
        ("GPUs", "requests/s", "Arrow", "minimal load"),
        [
            (
                str(gpus),
                show(point.offered_req_s),
                f"{point.attainment:.1%}",
                f"{minimal[gpus].attainment:.1%}",
            )
            for gpus, point in arrow.items()
        ],
    )
    found = {**measured.scaled_rates, setup.GPUS: measured.rates[SCALING_TRACE.name][setup.ARROW]}
    return f"{at}\n\n" + markdown_table(
        ("GPUs", "Arrow's sustainable requests/s"), [(str(gpus), show(found[gpus].req_s)) for gpus in sorted(found)]
    )


def _low_loads(measured: Measured) -> str:
    lows = tuple(next(iter(measured.low_loads.values())))
    return markdown_table(
        ("trace", *(f"{low:g}" for low in lows)),
        [(name, *(f"{points[low].attainment:.1%}" for low in lows)) for name, points in measured.low_loads.items()],
    )


def _overload(measured: Measured) -> str:
    def row(name: str, point: LoadPoint) -> tuple[str, ...]:
        report = point.report
        return (
            name,
            show(point.offered_req_s),
            f"{point.attainment:.1%}",
            show(report.ttft_ms.p90),
            show(report.tpot_ms.p90),
        )

    return markdown_table(
        ("trace", "requests/s", "attainment", "P90 TTFT ms", "P90 TPOT ms"),
        [row(name, point) for name, point in measured.overload.items()],
    )
