"""Latency against quality of the routings that a plan was chosen from, as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from controlplane.planning.cascade.latency import IN_WORDS
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.cascade.search import Point
from simulator.report.plot import require_matplotlib
from simulator.report.plot_style import use_log_scale


def draw_pareto_front(path: Path, points: Sequence[Point], front: Sequence[Point], plan: CascadePlan) -> None:
    """Write the PNG at `path`: what was looked at, what nothing beats, and what was chosen."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    held = [point for point in points if point.latency_s < float("inf")]
    axes.scatter(
        [point.quality for point in held], [point.latency_s for point in held], s=8, alpha=0.3, label="routings"
    )
    axes.step(
        [point.quality for point in front], [point.latency_s for point in front], where="pre", label="best of both"
    )
    axes.scatter([plan.quality], [plan.latency_s], marker="*", s=180, zorder=3, label="the plan")
    if plan.quality_target is not None:
        axes.axvline(plan.quality_target, linestyle="--", color="grey", label="quality asked for")
    if plan.latency_target_s is not None:
        axes.axhline(plan.latency_target_s, linestyle=":", color="grey", label="latency asked for")
    axes.set_xlabel("quality (mean score of accepted answers)")
    axes.set_ylabel(f"latency, {IN_WORDS[plan.minimise]} (s)")
    use_log_scale(axes, "y")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    axes.set_title(f"{plan.name}: {plan.gpus} GPUs, {plan.rate_per_s:g} requests/s")
    figure.savefig(path, format="png", dpi=120)
