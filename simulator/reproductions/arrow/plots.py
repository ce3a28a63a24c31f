"""The paper's figures 7, 8 and 9, and the sensitivity to the threshold that it leaves open."""

from collections.abc import Callable
from pathlib import Path

from simulator.reproductions.arrow import setup
from simulator.reproductions.arrow.experiment import LOW_LOAD_RATE, SCALING_TRACE, Measured
from simulator.reproductions.lines_plot import Panel, draw_lines
from simulator.reproductions.measurement import LoadPoint
from simulator.reproductions.sustainable_rate import TARGET_ATTAINMENT

_TARGET = {"90 %": TARGET_ATTAINMENT}
_RATE = "requests/s"


def draw(folder: Path, measured: Measured) -> tuple[str, ...]:
    """Write the PNG files; their names in the order of the page."""
    draw_lines(folder / "rates.png", [*_by_rate(measured)], columns=3)
    draw_lines(folder / "strategies.png", [*_strategies(measured)], "Minimal load and round robin at equal rates")
    draw_lines(folder / "scaling.png", [_scaling(measured), _low_load(measured)])
    return ("rates.png", "strategies.png", "scaling.png")


def _by_rate(measured: Measured) -> list[Panel]:
    def panels(label: str, value: Callable[[LoadPoint], float | None], limit_of: str | None) -> list[Panel]:
        return [
            Panel(
                title=trace.name,
                x_label=_RATE,
                y_label=label,
                lines={
                    name: [(p.offered_req_s, y) for p in load.points if (y := value(p)) is not None]
                    for name, load in measured.rates[trace.name].items()
                },
                limits=_TARGET if limit_of is None else {"SLO": getattr(trace.slo, limit_of)},
                is_x_log=True,
                is_y_log=limit_of is not None,
            )
            for trace in setup.TRACES
        ]

    return [
        *panels("share of requests within the SLOs", lambda point: point.attainment, None),
        *panels("P90 TTFT (ms)", lambda point: point.report.ttft_ms.p90, "ttft_ms"),
        *panels("P90 TPOT (ms)", lambda point: point.report.tpot_ms.p90, "tpot_ms"),
    ]


def _strategies(measured: Measured) -> list[Panel]:
    return [
        Panel(
            title=trace.name,
            x_label=_RATE,
            y_label="share of requests within the SLOs",
            lines={
                name: [(point.offered_req_s, point.attainment) for point in points]
                for name, points in measured.sweeps[trace.name].items()
            },
            limits=_TARGET,
        )
        for trace in setup.TRACES
    ]


def _scaling(measured: Measured) -> Panel:
    return Panel(
        title=f"{SCALING_TRACE.name}, at the rate that Arrow sustains with 8 GPUs",
        x_label="GPUs",
        y_label="share of requests within the SLOs",
        lines={
            name.partition(",")[0]: [(gpus, point.attainment) for gpus, point in points.items()]
            for name, points in measured.scaling.items()
        },
        limits=_TARGET,
    )


def _low_load(measured: Measured) -> Panel:
    return Panel(
        title=f"Arrow at {LOW_LOAD_RATE:g} x its sustainable rate",
        x_label="low_load",
        y_label="share of requests within the SLOs",
        lines={
            name: [(low, point.attainment) for low, point in points.items()]
            for name, points in measured.low_loads.items()
        },
        limits=_TARGET,
    )
