"""The result of one simulation: its requests, its load and both as a report."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from simulator.cluster.recording import LoadSeries, RecordingConfig, StepTimes
from simulator.cluster.simulation import ClusterSimulation
from simulator.report.outcome import RequestOutcome
from simulator.report.plot import LoadCurve

RECORDING = RecordingConfig(interval_ms=1000.0, max_samples=600)


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """The load of a run; its fields are the JSON form."""

    preemptions: int
    """Requests that lost their KV because memory ran out, each time counted."""
    imbalance: float | None
    """Standard deviation over mean of the instances' requests (running and queued), mean over the time in which there
    were any; None: never sampled."""
    decode_step_ms: float | None
    """Mean duration of the steps that decode; None without one."""
    decode_step_deviation_ms: float | None
    """Standard deviation of the same over all instances."""
    transfers: int
    """Requests that moved from a prefill to a decode instance."""
    kv_moved_gib: float


@dataclass(frozen=True, slots=True, eq=False)
class SimulationRun:
    """Outcomes in the order of the trace, and the load on the way."""

    outcomes: list[RequestOutcome]
    series: LoadSeries
    load: LoadReport
    recorded: bytes | None = None
    """The run for the console, as JSON, where that was asked for."""

    @property
    def curve(self) -> LoadCurve:
        """Running and queued requests over time, for plots."""
        series = self.series
        requests = (series.running_requests + series.queued_requests).sum(axis=1).astype(np.float64)
        return LoadCurve(series.times_s, requests, series.imbalance)


def run_of(
    simulation: ClusterSimulation, outcomes: list[RequestOutcome], recorded: Callable[[LoadReport], bytes] | None = None
) -> SimulationRun:
    """After the end of a simulation that was recorded. `recorded` makes of its load what the console shows."""
    recording = simulation.recording
    assert recording is not None, "simulations of the command line are recorded"
    series = recording.series()
    busy = (series.running_requests + series.queued_requests).sum(axis=1) > 0
    steps = _together(list(recording.step_times.values()))
    load = LoadReport(
        preemptions=simulation.preemptions,
        imbalance=float(series.imbalance[busy].mean()) if busy.any() else None,
        decode_step_ms=steps.mean_ms if steps.steps else None,
        decode_step_deviation_ms=steps.variance_ms2**0.5 if steps.steps else None,
        transfers=simulation.migrations.transferred,
        kv_moved_gib=simulation.links.moved_bytes / (1 << 30),
    )
    return SimulationRun(outcomes, series, load, None if recorded is None else recorded(load))


def load_rows(load: LoadReport) -> dict[str, str]:
    """The load of a run as name and text, for the rows of a table."""
    rows = {
        "preemptions": f"{load.preemptions:,}",
        "imbalance of load": "-" if load.imbalance is None else f"{load.imbalance:.3f}",
        "decode step ms mean": "-" if load.decode_step_ms is None else f"{load.decode_step_ms:,.2f}",
        "decode step ms deviation": "-"
        if load.decode_step_deviation_ms is None
        else f"{load.decode_step_deviation_ms:,.2f}",
    }
    if load.transfers:
        rows["transfers"] = f"{load.transfers:,}"
        rows["KV moved GiB"] = f"{load.kv_moved_gib:,.1f}"
    return rows


def _together(times: list[StepTimes]) -> StepTimes:
    return StepTimes(
        sum(each.steps for each in times),
        sum(each.sum_ms for each in times),
        sum(each.squares_ms2 for each in times),
        max((each.longest_ms for each in times), default=0.0),
    )
