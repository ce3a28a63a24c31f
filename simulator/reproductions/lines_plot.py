"""Line plots of a reproduction: figures over a rate, a number of GPUs, a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simulator.report.plot import require_matplotlib
from simulator.report.plot_style import line_style, use_log_scale

Points = Sequence[tuple[float, float]]

_MAX_COLUMNS = 4
_PANEL_INCHES = (5.0, 3.8)


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: a line for each name, markers at its points."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    limits: Mapping[str, float] = field(default_factory=dict)
    """Horizontal grey lines by their label, e.g. a target."""
    is_x_log: bool = False
    is_y_log: bool = False


def draw_lines(path: Path, panels: Sequence[Panel], title: str = "", columns: int = _MAX_COLUMNS) -> None:
    """Write the PNG at `path`, so many panels side by side at most. Raises `ConfigurationError` where plots cannot be
    drawn."""
    require_matplotlib()
    from matplotlib.figure import Figure

    # Figure, not pyplot: no global state and no display.
    columns = min(len(panels), columns)
    # One legend below where all panels have the same lines: it would hide some of them otherwise.
    is_shared = len(panels) > 2 and len({tuple(panel.lines) for panel in panels}) == 1
    rows = -(-len(panels) // columns)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in zip(grid, panels, strict=False):
        for number, (name, points) in enumerate(panel.lines.items()):
            ordered, style = sorted(points), line_style(number)
            axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", markersize=3, label=name, **style)
        for label, value in panel.limits.items():
            axes.axhline(value, linewidth=1.0, color="grey", label=label)
        if panel.is_x_log:
            use_log_scale(axes, "x")
        if panel.is_y_log:
            use_log_scale(axes, "y")
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.grid(visible=True, alpha=0.3)
        if panel.lines and not is_shared:
            axes.legend(fontsize="small")
    if is_shared:
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=len(names))
    for axes in figure.axes[len(panels) :]:
        axes.set_axis_off()
    if title:
        figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)
