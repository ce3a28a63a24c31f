"""Attainment over the SLO scale (figure 5), throughput (figure 6), how balanced the tiers are (figure 8), and the front
of latency and quality."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from simulator.report.plot import require_matplotlib
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cases import Case
from simulator.reproductions.cascadia.experiment import Measured
from simulator.reproductions.cascadia.plans import PublishedPlan, balance, published_cases
from simulator.reproductions.cascadia.systems import CASCADIA, COMPARED, SARATHI, SYSTEMS
from simulator.reproductions.cascadia.workload import TRACES
from simulator.reproductions.lines_plot import Panel, draw_lines

ATTAINMENT_PLOT, THROUGHPUT_PLOT, TIERS_PLOT, FRONT_PLOT = "attainment.png", "throughput.png", "tiers.png", "front.png"


def draw(folder: Path, measured: Measured) -> tuple[str, ...]:
    """Write the PNG files; their names in the order of the page."""
    panels = [_attainment(case) for case in measured.cases]
    draw_lines(folder / ATTAINMENT_PLOT, panels, columns=len(measured.size.targets))
    _throughput(folder / THROUGHPUT_PLOT, [case for case in measured.cases if case.is_searched(CASCADIA)])
    fronts = {name: [(point.quality, point.latency_s) for point in points] for name, points in measured.fronts.items()}
    title = f"Routings that nothing beats on {setup.GPUS} GPUs"
    draw_lines(folder / FRONT_PLOT, [Panel(title, "quality", "p95 of the slowest tier (s)", fronts, is_y_log=True)])
    _tiers(folder / TIERS_PLOT, published_cases(measured.cases))
    return ATTAINMENT_PLOT, THROUGHPUT_PLOT, TIERS_PLOT, FRONT_PLOT


def _attainment(case: Case) -> Panel:
    lines = {}
    for system in COMPARED:
        if system in case.runs:
            quantiles_s = case.runs[system].quantiles_s
            parts = np.linspace(0, 1, len(quantiles_s)).tolist()
            lines[system] = [(at_s / case.alone_s, part) for at_s, part in zip(quantiles_s, parts, strict=True)]
    title = f"{case.trace}, target {case.quality:g}"
    return Panel(title, "SLO scale", "share of requests in time", lines, {"95 %": setup.ATTAINMENT})


def _throughput(path: Path, cases: Sequence[Case]) -> None:
    names = [name for name in (*SYSTEMS, SARATHI) if any(case.result(name).saturated_per_s for case in cases)]
    bars = {name: [case.result(name).saturated_per_s or 0.0 for case in cases] for name in names}
    labels = [f"{case.trace}\n{case.quality:g}" for case in cases]
    _bars(path, bars, labels, "Throughput under saturation", "trace and quality target", "requests/s")


def _tiers(path: Path, cases: Sequence[tuple[PublishedPlan, Case]]) -> None:
    parts = [balance(case.runs[CASCADIA]) for _, case in cases]
    bars = {f"tier {number + 1}": [of_case[number] for of_case in parts] for number in range(3)}
    labels = [f"({case.quality:g}, {1 + TRACES.index(case.trace)})" for _, case in cases]
    title = "Latency of each tier within Cascadia's plans (figure 8)"
    _bars(path, bars, labels, title, "quality target and trace", "p95 over the slowest tier's")


def _bars(
    path: Path, bars: Mapping[str, Sequence[float]], labels: Sequence[str], title: str, x_label: str, y_label: str
) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.6 * len(labels)), 4.0), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(bars), 1)
    for number, (name, heights) in enumerate(bars.items()):
        axes.bar(np.arange(len(labels)) + number * width, heights, width, label=name)
    axes.set_xticks(np.arange(len(labels)) + 0.4 - width / 2, labels, fontsize="small")
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, axis="y", alpha=0.3)
    if bars:
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
