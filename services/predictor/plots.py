"""Pictures of a training and of an evaluation. Imports matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from services.predictor.evaluation import CurvePoint, EvaluationReport
from services.predictor.training_log import LoggedEpoch

_DPI: Final = 110
_LONG: Final = "long:"
_DASHES: Final = ("--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))


def draw_loss(path: Path, epochs: Sequence[LoggedEpoch], title: str) -> None:
    """Mean absolute error by epoch, of training and validation."""
    axes, save = _axes(1)
    numbers = [epoch.number for epoch in epochs]
    axes[0].plot(numbers, [epoch.train_mae_tokens for epoch in epochs], label="training")
    axes[0].plot(numbers, [epoch.validation_mae_tokens for epoch in epochs], label="validation", linestyle="--")
    best = min(epochs, key=lambda epoch: epoch.validation_mae_tokens)
    axes[0].axvline(best.number, color="grey", linewidth=1, linestyle=":", label=f"kept: epoch {best.number}")
    axes[0].set(xlabel="epoch", ylabel="mean absolute error (tokens)", title=title)
    axes[0].legend()
    save(path)


def draw_errors(path: Path, report: EvaluationReport) -> None:
    """Mean absolute error over the tokens generated so far: all held-out requests, of which ever fewer and longer ones
    are left, and the same long ones from their beginning (the counterpart of STAR's figure 7)."""
    axes, save = _axes(2)
    for axis, prefix, what in zip(
        axes, ("", _LONG), ("all requests", "those of {} to {} tokens".format(*report.long_tokens)), strict=True
    ):
        _draw_curves(
            axis,
            {
                name.removeprefix(prefix): points
                for name, points in report.curves.items()
                if name.startswith(_LONG) == bool(prefix)
            },
        )
        axis.set(xlabel="tokens generated so far", title=f"{report.model}: {what}", ylim=(0, None))
    axes[0].set_ylabel("mean absolute error (tokens)")
    axes[0].legend(fontsize=8)
    save(path)


def _draw_curves(axis: Any, curves: Mapping[str, Sequence[CurvePoint]]) -> None:
    for number, (name, points) in enumerate(curves.items()):
        middle = [(point.from_generated_tokens + point.to_generated_tokens) / 2 for point in points]
        is_own = name == "predictor"
        dashes = _DASHES[number % len(_DASHES)]
        style = {"linewidth": 2.5, "color": "black"} if is_own else {"linewidth": 1.2, "linestyle": dashes}
        axis.plot(middle, [point.mae_tokens for point in points], label=name, **style)


def _axes(columns: int) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]

    def save(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=_DPI)

    return axes, save
