"""CDFs of TTFT, TPOT and end-to-end latency, and load over time, as a PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError
from simulator.report.outcome import RequestOutcome
from simulator.report.plot_style import line_style, use_log_scale
from simulator.report.report import Slo

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LEGEND_COLUMNS = 6
_LINEAR_BELOW_RATIO = 20.0
"""A logarithmic axis where the largest value is this many times the smallest, otherwise a linear one."""

Floats = NDArray[np.float64]
_Value = Callable[[RequestOutcome], float | None]


def require_matplotlib() -> None:
    """Raises ConfigurationError where plots cannot be drawn; ask before a long run, not after it."""
    try:
        import matplotlib.figure  # noqa: F401 - half a second to import, only for plots
    except ImportError as error:
        raise ConfigurationError(
            "plots need matplotlib: pip install 'penstock[bench]', or leave the plot out"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class LoadCurve:
    """The load of one run over time; arrays of shape (samples,)."""

    times_s: Floats
    requests: Floats
    """Running and queued, of all instances."""
    imbalance: Floats
    """Between the instances: standard deviation over mean of their requests."""


def draw_cdfs(path: Path, runs: Mapping[str, Sequence[RequestOutcome]], slo: Slo, title: str = "") -> None:
    """Write the PNG at `path`: one line per run, limits of the SLO dashed, failed requests left out."""
    draw_comparison(path, runs, {}, slo, title)


def draw_comparison(
    path: Path,
    runs: Mapping[str, Sequence[RequestOutcome]],
    loads: Mapping[str, LoadCurve],
    slo: Slo,
    title: str = "",
) -> None:
    """The same, with the load of the runs over time below, as far as it is known."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    # Figure, not pyplot: no global state and no display.
    legend_rows = -(-len(runs) // _LEGEND_COLUMNS)
    figure = Figure(figsize=(15, (9 if loads else 4.5) + 0.25 * legend_rows), layout="constrained")
    grid = figure.add_gridspec(2 if loads else 1, 6)
    panels: tuple[tuple[str, _Value, float | None], ...] = (
        ("Time to first token", lambda outcome: outcome.ttft_ms, slo.ttft_ms),
        ("Time per output token", lambda outcome: outcome.tpot_ms, slo.tpot_ms),
        ("End-to-end latency", lambda outcome: outcome.e2e_ms, None),
    )
    for place, (label, value, limit_ms) in enumerate(panels):
        axes = figure.add_subplot(grid[0, 2 * place : 2 * place + 2])
        _draw_panel(axes, runs, value, limit_ms)
        axes.set(title=label, xlabel="ms", ylabel="share of requests at or below")
    if loads:
        _draw_loads(figure.add_subplot(grid[1, :3]), loads, "Requests, running and queued", lambda load: load.requests)
        axes = figure.add_subplot(grid[1, 3:])
        _draw_loads(axes, loads, "Imbalance between instances", lambda load: load.imbalance)
        axes.set_ylabel("standard deviation / mean")
    # One legend for all panels: in each it would hide its lines.
    handles = [Line2D([], [], **line_style(number)) for number in range(len(runs))]
    figure.legend(handles, list(runs), loc="outside lower center", ncols=min(len(runs), _LEGEND_COLUMNS))
    if title:
        figure.suptitle(title)
    figure.savefig(path, format="png", dpi=120)


def _draw_loads(axes: Axes, loads: Mapping[str, LoadCurve], title: str, value: Callable[[LoadCurve], Floats]) -> None:
    for number, load in enumerate(loads.values()):
        axes.plot(load.times_s, value(load), linewidth=1.2, **line_style(number))
    axes.set(title=title, xlabel="time (s)")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)


def _draw_panel(
    axes: Axes, runs: Mapping[str, Sequence[RequestOutcome]], value: _Value, limit_ms: float | None
) -> None:
    smallest, largest = np.inf, 0.0
    for number, outcomes in enumerate(runs.values()):
        measured = (value(outcome) for outcome in outcomes if not outcome.error)
        values = np.sort(np.array([ms for ms in measured if ms is not None]))
        if values.size == 0:
            continue
        smallest, largest = min(smallest, values[0]), max(largest, values[-1])
        # The step at each value is as high as the share of requests at or below it.
        shares = np.arange(1, values.size + 1) / values.size
        axes.step(np.insert(values, 0, values[0]), np.insert(shares, 0, 0.0), where="post", **line_style(number))
    if largest == 0.0:
        axes.text(0.5, 0.5, "no values", ha="center", va="center", transform=axes.transAxes)
        return
    if smallest > 0 and largest / smallest >= _LINEAR_BELOW_RATIO:
        use_log_scale(axes, "x")
    if limit_ms is not None:
        axes.axvline(limit_ms, color="grey", linewidth=1.0, label=f"SLO {limit_ms:g} ms")
        axes.legend(loc="lower right")
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, alpha=0.3)
