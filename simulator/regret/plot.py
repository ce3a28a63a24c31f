"""The regrets as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.regret.rows import RegretReport
from simulator.report.plot import require_matplotlib

_MOST_SHOWN = 2.0
"""A regret of 200 %; more looks the same."""


def draw_regrets(path: Path, report: RegretReport) -> None:
    """Write a PNG: each policy's regret in each trace and load, the least greatest regret first; with 95 % intervals
    where there are several seeds. Raises `ConfigurationError` where plots cannot be drawn."""
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    policies = list(report.max_regret)
    columns = list(dict.fromkeys((row.trace, row.kv, row.load) for row in report.rows))
    regrets = np.zeros((len(policies), len(columns)))
    intervals = np.zeros_like(regrets)
    for row in report.rows:
        place = policies.index(row.policy), columns.index((row.trace, row.kv, row.load))
        regrets[place], intervals[place] = row.regret, row.regret_interval
    figure = Figure(figsize=(2.5 + 0.42 * len(columns), 3.6 + 0.42 * len(policies)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(np.minimum(regrets, _MOST_SHOWN), cmap="YlOrRd", vmin=0, vmax=_MOST_SHOWN, aspect="auto")
    for (line, column), regret in np.ndenumerate(regrets):
        half = intervals[line, column]
        text = f"{100 * regret:.0f}" + (f"\n±{100 * half:.0f}" if half else "")
        colour = "white" if regret > 0.6 * _MOST_SHOWN else "black"
        axes.text(column, line, text, ha="center", va="center", fontsize=7, color=colour)
    labels = [f"{trace}, KV {kv}, {load:g}" for trace, kv, load in columns]
    axes.set_xticks(range(len(columns)), labels, rotation=60, ha="right")
    named = [f"{policy} (at most {100 * report.max_regret[policy]:.0f} %)" for policy in policies]
    axes.set_yticks(range(len(policies)), named)
    axes.set_title("Mean end-to-end latency above the best policy's, in %")
    axes.set(xlabel="trace, KV that is kept and pulled, load as a share of what is sustained", ylabel="policy")
    bar = figure.colorbar(image, ax=axes, shrink=0.8, extend="max", format=PercentFormatter(1.0))
    bar.set_label("regret")
    figure.savefig(path, format="png", dpi=110)
