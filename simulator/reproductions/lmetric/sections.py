"""The raw results as a page shows them, and the plots."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.lmetric import setup
from simulator.reproductions.lmetric.experiment import Measured, OnLoad, Runs
from simulator.reproductions.lmetric.hotspot import HOT_SHARE, PREFIX_TOKENS, RATE_PER_S, HotspotResult
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section
from simulator.reproductions.run import ReproductionRun

RATES_PLOT = "rates.png"
_HEADER = (
    "policy",
    "seeds",
    "mean TTFT ms",
    "P50",
    "P95",
    "mean TPOT ms",
    "P99 TPOT ms",
    "hit ratio",
    "imbalance (tokens)",
)


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
            if on_load.sweep
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
                contender: [(share, _mean(runs, what)) for share, runs in points.items()]
                for contender, points in on_load.sweep.items()
            },
            is_y_log=what == "TTFT",
        )
        for name, on_load in measured.loads.items()
        if on_load.sweep
        for what in ("TTFT", "TPOT")
    ]
    draw_lines(run.plots / RATES_PLOT, panels, "Mean latencies over the rate", columns=2)
    return (RATES_PLOT,)


def _mean(runs: Runs, what: str) -> float:
    """Over the seeds."""
    return fmean(run.ttft_ms if what == "TTFT" else run.tpot_ms for run in runs)


def _setup(measured: Measured, run: ReproductionRun) -> str:
    lines = [
        f"- {setup.INSTANCES} instances ({setup.QUICK_CHAT_INSTANCES} for chat with --quick) of one {setup.DEVICE} "
        "each, by the roofline cost model, prefix cache and memory as vLLM has them.",
        "- The highest rate is that at which 90 % of the requests keep the SLO under the best policy; half of it is "
        "the load of all tables but the rates'. The paper profiles it offline and does not say how.",
        "- Requests that arrive in the first part of a load fill the caches and are not counted.",
        "- The chat load are conversations drawn so that prompts have 2.3k tokens on average, as the paper's chat "
        "trace, which is not at hand. A higher rate is more conversations, not shorter pauses; of recorded traces it "
        "is the same requests in less time.",
        "- Rivals are tuned per trace over the settings in the tables; the one with the lowest mean TTFT stands for "
        "the rival. The simulation-based policy is tuned by fitting its step costs to the modelled engine; not tuned, "
        "it has those of the other model.",
        "- The coding agents' trace is a closed loop: a slower answer delays the next request, so a bad policy slows "
        "its own load down.",
    ]
    lines += [_load(load, measured.loads[load.name], run) for load in setup.LOADS]
    return "\n".join(lines)


def _load(load: setup.Load, on_load: OnLoad, run: ReproductionRun) -> str:
    warm_s, clip_s = (load.quick_warm_s, load.quick_clip_s) if run.quick else (load.warm_s, load.clip_s)
    slo = f"TTFT {load.slo.ttft_ms or 0:,.0f} ms, TPOT {load.slo.tpot_ms or 0:g} ms"
    return (
        f"- {load.name}: {load.trace}, {warm_s:g} s to fill the caches and {clip_s:g} s that count; {slo}; "
        f"highest rate {show(on_load.highest.req_s)} requests/s ({on_load.highest.finder}); "
        f"fluid bound {show(on_load.fluid_req_s)}."
    )


def _policies(at_half: Mapping[str, Runs]) -> str:
    return markdown_table(
        _HEADER,
        [
            (
                name,
                str(len(runs)),
                show(_mean(runs, "TTFT")),
                show(runs[0].report.ttft_ms.p50),
                show(runs[0].report.ttft_ms.p95),
                show(_mean(runs, "TPOT")),
                show(runs[0].report.tpot_ms.p99),
                f"{fmean(run.hit_ratio for run in runs):.1%}",
                show(fmean(run.imbalance_tokens for run in runs)),
            )
            for name, runs in at_half.items()
        ],
    )


def _sweep(on_load: OnLoad) -> str:
    shares = list(on_load.sweep[setup.OURS])
    return markdown_table(
        ("policy", *(f"TTFT / TPOT ms at {share:g}" for share in shares)),
        [
            (
                name,
                *(f"{show(_mean(points[share], 'TTFT'))} / {show(_mean(points[share], 'TPOT'))}" for share in shares),
            )
            for name, points in on_load.sweep.items()
        ],
    )


def _hotspot(results: Mapping[str, Sequence[HotspotResult]]) -> str:
    introduction = (
        f"{HOT_SHARE:.0%} of {RATE_PER_S:g} requests/s share a prefix of {PREFIX_TOKENS:,} tokens; the others share "
        "nothing. The first seed's runs:\n\n"
    )
    return introduction + markdown_table(
        ("policy", "mean TTFT ms", "P95 TTFT ms", "mean TPOT ms", "largest share of the hot class", "requests"),
        [
            (
                name,
                show(runs[0].ttft_ms.mean),
                show(runs[0].ttft_ms.p95),
                show(runs[0].tpot_ms.mean),
                f"{runs[0].largest_share:.0%}",
                str(runs[0].requests),
            )
            for name, runs in results.items()
        ],
    )
