"""The raw results as a page shows them, and the plots."""

from collections.abc import Mapping

from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import SWEEP, Measured, OnLoad, Placed
from simulator.reproductions.lmetric.hotspot import HOT_SHARE, PREFIX_TOKENS, RATE_PER_S, HotspotResult
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section
from simulator.reproductions.run import ReproductionRun

RATES_PLOT = "rates.png"
_HEADER = ("policy", "mean TTFT ms", "P50", "P95", "mean TPOT ms", "P99 TPOT ms", "hit ratio", "imbalance (tokens)")


def sections_of(measured: Measured, run: ReproductionRun) -> tuple[Section, ...]:
    """Setup, then everything that was measured."""
    return (
        Section(title="Setup", markdown=_setup(measured, run)),
        *(
            Section(title=f"{name}: all policies at half the highest rate", markdown=_policies(on_load.at_half))
            for name, on_load in measured.loads.items()
        ),
        *(
            Section(title=f"{name}: mean TTFT and TPOT over the rate", markdown=_sweep(on_load))
            for name, on_load in measured.loads.items()
        ),
        Section(title="A hotspot", markdown=_hotspot(measured.hotspot)),
    )


def draw(measured: Measured, run: ReproductionRun) -> tuple[str, ...]:
    """Figure 25: means over the rate."""
    panels = [
        Panel(
            title=name,
            x_label="share of the highest rate",
            y_label=f"mean {what} (ms)",
            lines={
                contender: [(share, _mean(placed, what)) for share, placed in points.items()]
                for contender, points in on_load.sweep.items()
            },
            is_y_log=what == "TTFT",
        )
        for name, on_load in measured.loads.items()
        for what in ("TTFT", "TPOT")
    ]
    draw_lines(run.plots / RATES_PLOT, panels, "Mean latencies over the rate", columns=2)
    return (RATES_PLOT,)


def _mean(placed: Placed, what: str) -> float:
    return (placed.report.ttft_ms.mean if what == "TTFT" else placed.report.tpot_ms.mean) or 0.0


def _setup(measured: Measured, run: ReproductionRun) -> str:
    lines = [
        f"- {setup.INSTANCES} instances of one {setup.DEVICE} each, by the roofline cost model, prefix cache and "
        "memory as vLLM has them.",
        "- The highest rate is what vLLM's policy has served per second when far more was offered; half of it is the "
        "load of all tables but the rates'. The paper profiles it offline and does not say how.",
        "- Rivals are tuned per trace over the settings in the tables; the one with the lowest mean TTFT stands for "
        "the rival. The simulation-based policy is tuned by fitting its step costs to the modelled engine; not tuned, "
        "it has those of the other model.",
        "- The coding agents' trace is a closed loop: a slower answer delays the next request, so a bad policy slows "
        "its own load down.",
    ]
    lines += [
        f"- {load.name}: the first {load.seconds(run.quick):g} s of {load.trace}; highest rate "
        f"{show(measured.loads[load.name].highest.req_s)} requests/s; fluid bound "
        f"{show(measured.loads[load.name].fluid_req_s)}."
        for load in setup.LOADS
    ]
    return "\n".join(lines)


def _policies(at_half: Mapping[str, Placed]) -> str:
    return markdown_table(
        _HEADER,
        [
            (
                name,
                show(placed.report.ttft_ms.mean),
                show(placed.ttft_p50_ms),
                show(placed.ttft_p95_ms),
                show(placed.report.tpot_ms.mean),
                show(placed.report.tpot_ms.p99),
                f"{placed.report.prefix_hit_rate or 0:.1%}",
                show(placed.imbalance_tokens),
            )
            for name, placed in at_half.items()
        ],
    )


def _sweep(on_load: OnLoad) -> str:
    return markdown_table(
        ("policy", *(f"TTFT / TPOT ms at {share:g}" for share in SWEEP)),
        [
            (name, *(f"{show(_mean(points[share], 'TTFT'))} / {show(_mean(points[share], 'TPOT'))}" for share in SWEEP))
            for name, points in on_load.sweep.items()
        ],
    )


def _hotspot(results: Mapping[str, HotspotResult]) -> str:
    told = (
        f"{HOT_SHARE:.0%} of {RATE_PER_S:g} requests/s share a prefix of {PREFIX_TOKENS:,} tokens; the others share "
        "nothing.\n\n"
    )
    return told + markdown_table(
        ("policy", "mean TTFT ms", "P95 TTFT ms", "mean TPOT ms", "largest share of the hot class", "requests"),
        [
            (
                name,
                show(result.ttft_ms.mean),
                show(result.ttft_ms.p95),
                show(result.tpot_ms.mean),
                f"{result.largest_share:.0%}",
                str(result.requests),
            )
            for name, result in results.items()
        ],
    )
