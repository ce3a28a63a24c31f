"""Arrow's claims beside what was measured."""

from collections.abc import Iterator

from simulator.reproductions.arrow import explanations, setup
from simulator.reproductions.arrow.experiment import (
    HOST_STEP_MS,
    LOW_LOAD_RATE,
    SCALED,
    SCALING_TRACE,
    Measured,
)
from simulator.reproductions.arrow.explanations import ratio
from simulator.reproductions.arrow.setup import ARROW, MINIMAL_LOAD, ROUND_ROBIN, Trace
from simulator.reproductions.report import ReportRow
from simulator.reproductions.sustainable_rate import TARGET_ATTAINMENT


def rows_of(measured: Measured) -> tuple[ReportRow, ...]:
    """All of them, in the order of the paper."""
    rows: list[ReportRow] = []
    for trace in setup.TRACES:
        rows += _comparisons(measured, trace)
    for trace in setup.TRACES:
        rows += _strategies(measured, trace)
    rows += _scaling(measured)
    rows.append(_overload(measured))
    rows += _low_loads(measured)
    rows += _host_bound(measured)
    return tuple(rows)


def _comparisons(measured: Measured, trace: Trace) -> Iterator[ReportRow]:
    """Rows of figure 7."""
    rates = measured.rates[trace.name]
    yield ReportRow(
        claim=f"{trace.name}: Arrow's sustainable rate", paper=None, ours=rates[ARROW].req_s, unit="requests/s"
    )
    bound = measured.fluid_bounds[trace.name][ARROW]
    yield ReportRow(
        claim=f"{trace.name}: Arrow's sustainable rate over the fluid bound of the same instances",
        paper=None,
        ours=(rates[ARROW].req_s or 0.0) / bound,
        unit="x",
        why=explanations.of_bound(measured, trace),
    )
    for rival, published in (
        (setup.COLOCATED_TP8, trace.over_colocated),
        (setup.STATIC_TP4, trace.over_static),
        (setup.COLOCATED_TP1, None),
    ):
        ours = ratio(rates[ARROW], rates[rival])
        yield ReportRow(
            claim=f"{trace.name}: Arrow's sustainable rate over {rival}",
            paper=published,
            ours=ours,
            unit="x",
            why=explanations.of_rival(measured, trace, rival, published, ours),
        )


def _strategies(measured: Measured, trace: Trace) -> Iterator[ReportRow]:
    """Rows of figure 8."""
    rates, sweeps = measured.rates[trace.name], measured.sweeps[trace.name]
    for rival, published in ((MINIMAL_LOAD, trace.over_minimal_load), (ROUND_ROBIN, None)):
        ours = ratio(rates[ARROW], rates[rival])
        yield ReportRow(
            claim=f"{trace.name}: Arrow's sustainable rate over {rival}",
            paper=published,
            ours=ours,
            unit="x",
            why=explanations.of_strategy(measured, trace, published, ours),
        )
    gains = [
        100 * (minimal.attainment - in_turn.attainment)
        for minimal, in_turn in zip(sweeps[MINIMAL_LOAD], sweeps[ROUND_ROBIN], strict=True)
    ]
    yield ReportRow(
        claim=f"{trace.name}: largest gain in attainment of minimal load over round robin at the same rate",
        paper=trace.minimal_over_round_robin,
        ours=max(gains),
        unit="percentage points",
        why=explanations.of_gain(trace, max(gains)),
    )


def _scaling(measured: Measured) -> Iterator[ReportRow]:
    """Rows of figure 9."""
    few, many = (measured.scaled_rates[gpus] for gpus in SCALED)
    yield ReportRow(
        claim=f"{SCALING_TRACE.name}: Arrow's sustainable rate with {SCALED[1]} GPUs over {SCALED[0]} GPUs",
        paper="nearly linear",
        ours=ratio(many, few),
        unit=f"x ({SCALED[1] // SCALED[0]} is linear)",
        why=explanations.of_scaling(measured),
    )
    for name in (ARROW, MINIMAL_LOAD):
        points = measured.scaling[name]
        enough = [gpus for gpus, point in points.items() if point.attainment >= TARGET_ATTAINMENT]
        yield ReportRow(
            claim=f"{SCALING_TRACE.name}: fewest GPUs that keep 90 % at the rate that Arrow sustains with 8: "
            + name.partition(",")[0],
            paper=None,
            ours=float(min(enough)) if enough else f"more than {max(points)}",
            unit="GPUs",
        )


def _overload(measured: Measured) -> ReportRow:
    """Section 7.2: decode goes first when all is overloaded."""
    worst = max(
        (measured.overload[trace.name].report.tpot_ms.p90 or 0.0) / (trace.slo.tpot_ms or 1.0) for trace in setup.TRACES
    )
    return ReportRow(
        claim="Arrow's P90 TPOT at twice its sustainable rate, as a share of the SLO (the worst of the traces)",
        paper="close to the SLO",
        ours=worst,
        unit="x",
        why=explanations.of_overload(),
    )


def _low_loads(measured: Measured) -> Iterator[ReportRow]:
    for trace_name, points in measured.low_loads.items():
        attainments = [point.attainment for point in points.values()]
        yield ReportRow(
            claim=f"{trace_name}: attainment {LOW_LOAD_RATE:g} x above Arrow's sustainable rate, by low_load "
            + ", ".join(f"{low:g}" for low in points),
            paper=None,
            ours=", ".join(f"{attainment:.1%}" for attainment in attainments),
            unit="of all requests",
            why="the paper gives no fraction below which decode load is low; 0.5 is taken everywhere else",
        )


def _host_bound(measured: Measured) -> Iterator[ReportRow]:
    for trace_name, rates in measured.host_bound.items():
        for rival in (setup.COLOCATED_TP8, setup.STATIC_TP4, MINIMAL_LOAD):
            yield ReportRow(
                claim=f"{trace_name}: Arrow over {rival}, if each step took {HOST_STEP_MS:g} ms more on the host",
                paper=None,
                ours=ratio(rates[ARROW], rates[rival]),
                unit="x",
                why="a what-if for the rows above, which the paper has no figure for",
            )
