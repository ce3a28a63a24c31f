"""A workload that goes from trace 1 to trace 2 to trace 3, with and without planning anew (section 4.4).

Time is compressed: a minute lasts `minute_s`. What passes is sampled each minute, and the drift detector of the live
planner decides. A new plan serves the requests that come after it is up; those before it end on the old replicas.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import PlanInfeasible
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cases import Workload, single_request_s
from simulator.reproductions.cascadia.end_to_end import Arrivals, Deployed, serve
from simulator.reproductions.cascadia.setup import tiers_of
from simulator.reproductions.cascadia.systems import Bench, cascadia, stand_alone_tier
from simulator.reproductions.cascadia.tables import ScaledCurves


@dataclass(frozen=True, slots=True)
class Drifted:
    """One run over the whole workload."""

    scale: float
    """Rates over the traces' own."""
    is_replanned: bool
    switches: tuple[tuple[float, str], ...]
    """Minute at which a new plan served, and why it was made."""
    in_time_per_s: float
    offered_per_s: float
    p95_s: float
    quality: float
    segment_in_time: tuple[float, ...]
    """Share of the requests that were in time, for each trace."""
    segment_quality: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Stream:
    """All arrivals; rows are of all questions."""

    arrivals: Arrivals
    segments: NDArray[np.intp]
    """Of each request: the number of its trace."""
    seconds: float


def run_drift(traces: Sequence[Workload], scale: float, is_replanned: bool) -> Drifted:
    """Planned for the first trace at its rate; then replanned, or kept."""
    first = traces[0]
    minute_s = first.size.minute_s
    everything = first.everything.sample(1.0)
    benches = [trace.bench() for trace in traces]
    rates = [bench.sample.rate_per_s * scale for bench in benches]
    stream = _stream(traces, rates, minute_s)
    bench = benches[0].at(rates[0])
    epochs = [(0.0, "", cascadia(bench, setup.DRIFT_QUALITY))]
    if is_replanned:
        epochs += _replans(first, bench.sample, everything, stream)
    limit_s = setup.FIXED_SLO_SCALE * single_request_s(benches[0], stand_alone_tier(bench.sample, setup.DRIFT_QUALITY))
    latencies_s, scores = _serve_epochs(everything, bench, epochs, stream, first.seed)
    in_time = latencies_s <= limit_s
    of_segment = [stream.segments == number for number in range(len(traces))]
    return Drifted(
        scale=scale,
        is_replanned=is_replanned,
        switches=tuple((at_s / minute_s, why) for at_s, why, _ in epochs[1:]),
        in_time_per_s=float(in_time.sum() / stream.seconds),
        offered_per_s=float(len(in_time) / stream.seconds),
        p95_s=float(np.quantile(latencies_s, 0.95)),
        quality=float(scores.mean()),
        segment_in_time=tuple(float(in_time[here].mean()) for here in of_segment),
        segment_quality=tuple(float(scores[here].mean()) for here in of_segment),
    )


def _stream(traces: Sequence[Workload], rates: Sequence[float], minute_s: float) -> _Stream:
    times: list[NDArray[np.float64]] = []
    rows: list[NDArray[np.intp]] = []
    segments: list[NDArray[np.intp]] = []
    start_s = 0.0
    for number, (trace, rate, minutes) in enumerate(zip(traces, rates, setup.DRIFT_MINUTES, strict=True)):
        rng = np.random.default_rng((trace.seed, number))
        seconds = minutes * minute_s
        count = round(rate * seconds)
        times.append(start_s + np.sort(rng.uniform(0, seconds, count)))
        rows.append(trace.answers.questions[rng.integers(0, len(trace.answers.questions), count)])
        segments.append(np.full(count, number))
        start_s += seconds
    return _Stream(Arrivals(np.concatenate(times), np.concatenate(rows)), np.concatenate(segments), start_s)


def _replans(
    first: Workload, planned_for: CascadeSample, everything: CascadeSample, stream: _Stream
) -> list[tuple[float, str, Deployed]]:
    """When which plan serves."""
    settings = DriftSettings()
    detector = DriftDetector(_summary(planned_for, planned_for.rate_per_s), settings)
    minute_s = first.size.minute_s
    rng = np.random.default_rng((first.seed, 99))
    windows: list[NDArray[np.intp]] = []
    found: list[tuple[float, str, Deployed]] = []
    for minute in range(round(stream.seconds / minute_s)):
        within = (stream.arrivals.times_s >= minute * minute_s) & (stream.arrivals.times_s < (minute + 1) * minute_s)
        rows = stream.arrivals.rows[within]
        if not len(rows):
            continue
        windows.append(rng.choice(rows, min(setup.WINDOW_REQUESTS, len(rows)), replace=False))
        rate = len(rows) / minute_s
        why = detector.seen(_summary(_rows(everything, windows[-1], rate), rate))
        if not why:
            continue
        recent = _rows(everything, np.concatenate(windows[-settings.windows :]), rate)
        try:
            deployed = cascadia(_bench(first, recent), setup.DRIFT_QUALITY)
        except PlanInfeasible:
            detector.refused()
            continue
        detector.replanned(_summary(recent, rate))
        found.append(((minute + 1 + setup.SWITCH_MINUTES) * minute_s, why, deployed))
    return found


def _bench(first: Workload, sample: CascadeSample) -> Bench:
    tiers = tiers_of(first.models, first.size.is_quick)
    everything = first.everything.sample(1.0)
    source = ScaledCurves(everything, sample, tiers, first.curves, first.seed)
    return Bench(sample, tiers, source, setup.GPUS, setup.JUDGE_S, first.uniform_gpus, everything)


def _rows(everything: CascadeSample, rows: NDArray[np.intp], rate_per_s: float) -> CascadeSample:
    return CascadeSample(
        everything.scores[rows], everything.input_tokens[rows], everything.output_tokens[rows], rate_per_s
    )


def _summary(sample: CascadeSample, rate_per_s: float) -> WorkloadSummary:
    return WorkloadSummary(
        rate_per_s=rate_per_s,
        input_tokens=float(sample.input_tokens.mean()),
        output_tokens=float(sample.output_tokens[:, 0].mean()),
        score=float(sample.scores[:, 0].mean()),
        requests=sample.requests,
    )


def _serve_epochs(
    everything: CascadeSample,
    bench: Bench,
    epochs: Sequence[tuple[float, str, Deployed]],
    stream: _Stream,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    starts = [at_s for at_s, _, _ in epochs]
    epoch_of = np.searchsorted(starts, stream.arrivals.times_s, side="right") - 1
    latencies_s, scores = np.zeros(len(epoch_of)), np.zeros(len(epoch_of))
    sample = replace(everything, rate_per_s=bench.sample.rate_per_s)
    for number, (_, _, deployed) in enumerate(epochs):
        here = np.flatnonzero(epoch_of == number)
        if not len(here):
            continue
        part = Arrivals(stream.arrivals.times_s[here], stream.arrivals.rows[here])
        served = serve(sample, bench.tiers, deployed, part, bench.judge_s, seed)
        latencies_s[here], scores[here] = served.latencies_s, served.scores
    return latencies_s, scores
