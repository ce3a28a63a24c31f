"""Attainment over the SLO scale (figure 5), throughput (figure 6) and the front of latency and quality."""

from pathlib import Path

import numpy as np

from simulator.report.plot import require_matplotlib
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cases import Case
from simulator.reproductions.cascadia.experiment import Measured
from simulator.reproductions.cascadia.systems import COMPARED, SYSTEMS
from simulator.reproductions.lines_plot import Panel, draw_lines

ATTAINMENT_PLOT, THROUGHPUT_PLOT, FRONT_PLOT = "attainment.png", "throughput.png", "front.png"
_POINTS = 60


def draw(folder: Path, measured: Measured) -> tuple[str, ...]:
    """Write the PNG files; their names in the order of the page."""
    panels = [_attainment(case) for case in measured.cases]
    draw_lines(folder / ATTAINMENT_PLOT, panels, columns=len(measured.size.targets))
    _bars(folder / THROUGHPUT_PLOT, [case for case in measured.cases if case.saturated_per_s])
    fronts = {name: [(point.quality, point.latency_s) for point in points] for name, points in measured.fronts.items()}
    title = f"Routings that nothing beats on {setup.GPUS} GPUs"
    draw_lines(folder / FRONT_PLOT, [Panel(title, "quality", "p95 of the slowest tier (s)", fronts, is_y_log=True)])
    return ATTAINMENT_PLOT, THROUGHPUT_PLOT, FRONT_PLOT


def _attainment(case: Case) -> Panel:
    lines = {}
    for system in COMPARED:
        if system in case.runs:
            latencies_s = case.runs[system].latencies_s
            picked = np.unique(np.linspace(0, len(latencies_s) - 1, _POINTS).astype(int))
            lines[system] = [(latencies_s[at] / case.alone_s, (at + 1) / len(latencies_s)) for at in picked.tolist()]
    title = f"{case.trace}, target {case.quality:g}"
    return Panel(title, "SLO scale", "share of requests in time", lines, {"95 %": setup.ATTAINMENT})


def _bars(path: Path, cases: list[Case]) -> None:
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(6.0, 1.6 * len(cases)), 4.0), layout="constrained")
    axes = figure.subplots()
    shown = [system for system in SYSTEMS if any(system in case.saturated_per_s for case in cases)]
    width = 0.8 / max(len(shown), 1)
    for number, system in enumerate(shown):
        heights = [case.saturated_per_s.get(system) or 0.0 for case in cases]
        axes.bar(np.arange(len(cases)) + number * width, heights, width, label=system)
    labels = [f"{case.trace}\n{case.quality:g}" for case in cases]
    axes.set_xticks(np.arange(len(cases)) + 0.4 - width / 2, labels, fontsize="small")
    axes.set(title="Throughput under saturation", xlabel="trace and quality target", ylabel="requests/s")
    axes.grid(visible=True, axis="y", alpha=0.3)
    if shown:
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=120)
