"""What all plots share: lines that are told apart without colours, too, and ticks that are read as numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = ("-", "--", "-.", ":")
_COLOURS = 10
"""Of matplotlib's own cycle."""


def line_style(number: int) -> dict[str, Any]:
    """Of the line with this number, from 0: forty are all different, and neighbours differ in colour and dashes."""
    return {"color": f"C{number % _COLOURS}", "linestyle": _DASHES[(number + number // _COLOURS) % len(_DASHES)]}


def use_log_scale(axes: Axes, which: str) -> None:
    """Of the axis `x` or `y`, with ticks at 1, 2 and 5 of each power of ten, written out."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.set_minor_formatter(NullFormatter())
