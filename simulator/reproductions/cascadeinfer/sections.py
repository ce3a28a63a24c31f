"""Plots, and what stands on the page below the rows."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from simulator.reproductions.cascadeinfer.experiments import IDLE_RATE, Scale, job_name
from simulator.reproductions.cascadeinfer.profiling import ProfileResult
from simulator.reproductions.cascadeinfer.systems import INSTANCES, RunResult, Setting, SystemKind
from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.page import markdown_table, show
from simulator.reproductions.report import Section

Results = Mapping[str, RunResult]

FIGURES = (
    ("mean_ttft_ms", "mean TTFT, ms"),
    ("mean_tpot_ms", "mean TPOT, ms"),
    ("normalised_ms", "normalised latency, ms per token"),
    ("throughput_tok_s", "tokens/s"),
)


def plots(folder: Path, results: Results, scale: Scale) -> tuple[str, ...]:
    """Latency and throughput over the rate; attainment."""
    made = []
    for part, rates in (("small", scale.small_rates), ("moderate", scale.moderate_rates)):
        panels = [
            Panel(
                title=label,
                x_label="requests/s",
                y_label=label,
                lines={
                    kind.value: [(rate, getattr(results[job_name(part, kind.value, rate)], figure)) for rate in rates]
                    for kind in SystemKind
                },
                is_y_log=figure != "throughput_tok_s",
            )
            for figure, label in FIGURES
        ]
        name = f"rates_{part}.png"
        draw_lines(folder / name, panels)
        made.append(name)
    idle = results[job_name("idle", "idle", IDLE_RATE)]
    panels = [
        Panel(
            title=f"SLO at {times}x",
            x_label="requests/s",
            y_label="attainment",
            lines={
                kind.value: [
                    (
                        rate,
                        results[job_name("small", kind.value, rate)].attainment(
                            times * idle.mean_ttft_ms, times * idle.mean_tpot_ms
                        ),
                    )
                    for rate in scale.small_rates
                ]
                for kind in SystemKind
            },
        )
        for times in (5, 20)
    ]
    draw_lines(folder / "attainment.png", panels)
    return (*made, "attainment.png")


def sections(
    made: Mapping[str, Setting], profiles: Mapping[str, ProfileResult], results: Results, scale: Scale
) -> tuple[Section, ...]:
    """Setup, plans, and every run."""
    return (
        Section(title="Setup", markdown=_setup(made, profiles, scale)),
        Section(title="Stages", markdown=_stages(results)),
        Section(title="All runs", markdown=_runs(results)),
    )


def _setup(made: Mapping[str, Setting], profiles: Mapping[str, ProfileResult], scale: Scale) -> str:
    rows = []
    for name, setting in made.items():
        config, _ = setting.instance(SystemKind.CASCADE)
        model = profiles[name].fit.model
        rows.append(
            (
                name,
                setting.model,
                setting.lengths,
                ("measured" if setting.unevenness else "tile model") if setting.heterogeneity else "off",
                f"{config.kv_blocks * config.block_tokens:,}",
                ", ".join(show(float(value)) for value in model.coefficients),
                f"{profiles[name].fit.relative_error:.1%}",
            )
        )
    header = ("setting", "model", "lengths", "heterogeneity", "KV tokens", "D_0 to D_4 in ms", "held-out error")
    return f"""
{INSTANCES} instances, each on one H20 with 141 GB by the roofline cost model; batches of at most 1,024 requests;
chunks of 2,048 prefill tokens (SGLang-like: 8,192); KV links of 46 GiB/s. Requests arrive as a Poisson process for
{scale.duration_s:g} s and draw their lengths from the data set. Throughput counts tokens generated while requests
arrive. Heavy load means {", ".join(f"{rate:g}/s" for rate in scale.heavy_rates)}; figures are means over these rates of
the ratios at each. The plan is made from the data set's lengths and the number of requests in flight that the fitted
model predicts at the rate. Each setting is profiled by itself, in a closed loop.

{markdown_table(header, rows)}
"""


def _stages(results: Results) -> str:
    header = (
        "run",
        "instances of each stage",
        "planned boundaries",
        "at the end",
        "requests moved",
        "offers without a taker",
    )
    rows = [
        (
            name,
            ", ".join(map(str, result.stages)),
            ", ".join(f"{tokens:,}" for tokens in result.boundaries_tokens),
            ", ".join(f"{tokens:,}" for tokens in result.refined_tokens),
            f"{result.moved:,}",
            "; ".join(f"{reason}: {count}" for reason, count in result.kept.items()),
        )
        for name, result in results.items()
        if result.stages
    ]
    return markdown_table(header, rows)


def _runs(results: Results) -> str:
    header = (
        "run", "requests", "mean TTFT", "p95", "mean TPOT", "p95", "normalised", "p95", "tokens/s", "CV in stages"
    )  # fmt: skip
    rows = [
        (
            name,
            f"{result.requests:,}",
            show(result.mean_ttft_ms),
            show(result.p95_ttft_ms),
            show(result.mean_tpot_ms),
            show(result.p95_tpot_ms),
            show(result.normalised_ms),
            show(result.p95_normalised_ms),
            show(result.throughput_tok_s),
            show(float(np.mean(result.output_cv))) if result.output_cv else "-",
        )
        for name, result in results.items()
    ]
    return "Times in ms.\n\n" + markdown_table(header, rows)
