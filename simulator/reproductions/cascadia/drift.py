"""A workload that goes from trace 1 to trace 2 to trace 3 (section 4.4).

Time is compressed where many requests come: a minute lasts `minute_s`. What passes is sampled each minute, and the
drift detector of the live planner decides when a system plans anew. A new plan serves the requests that come after it
is up; those before it end on the old replicas. The stand-alone model keeps the replicas that it was given for the first
trace, and the cascade is also shown with its first plan kept; Cascadia and CascadeServe-like plan anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
from controlplane.planning.cascade.sample import CascadeSample
from mesh.errors import PlanInfeasible
from simulator.cascade.deployed import Deployed, DrawnRequests, serve
from simulator.reproductions.cascadia import setup
from simulator.reproductions.cascadia.cascade_serve import cascade_serve
from simulator.reproductions.cascadia.planning_problem import PlanningProblem, System
from simulator.reproductions.cascadia.systems import (
    CASCADE_SERVE,
    CASCADIA,
    STAND_ALONE,
    cascadia,
    stand_alone,
    stand_alone_tier,
)
from simulator.reproductions.cascadia.workload import Workload, single_request_s

KEPT = "Cascadia, first plan kept"
DRIFTING: Mapping[str, tuple[System, bool]] = {
    CASCADIA: (cascadia, True),
    KEPT: (cascadia, False),
    STAND_ALONE: (stand_alone, False),
    CASCADE_SERVE: (cascade_serve, True),
}
"""What is compared, and whether it plans anew."""


@dataclass(frozen=True, slots=True)
class Drifted:
    """Result of one system over the drifting workload."""

    name: str
    """One of `DRIFTING`."""
    scale: float
    """Rates over the traces' own."""
    minute_s: float
    target: float
    seed: int
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

    arrivals: DrawnRequests
    segments: NDArray[np.intp]
    """Each request's trace, by its number."""
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Epoch:
    """A deployment, from when on it serves, and why it was made."""

    at_s: float
    why: str
    deployed: Deployed


def by_system(drifted: Sequence[Drifted]) -> Mapping[tuple[float, str], Sequence[Drifted]]:
    """Runs by target and system, with the seeds in order."""
    found: dict[tuple[float, str], list[Drifted]] = {}
    for run in drifted:
        found.setdefault((run.target, run.name), []).append(run)
    return found


def minute_s(traces: Sequence[Workload], scale: float) -> float:
    """How long a minute lasts, at the traces' own rates times `scale`."""
    of_traces = zip(traces, setup.DRIFT_MINUTES, strict=True)
    of_a_second = scale * sum(trace.rate_per_s * minutes for trace, minutes in of_traces)  # in each of the minutes
    return float(np.clip(traces[0].size.drift_requests / of_a_second, *setup.MINUTE_S))


def run_drift(
    traces: tuple[Workload, ...], scale: float, minute_s: float, target: float, name: str, seed: int
) -> Drifted:
    """Planned for the first trace at its rate times `scale`; then planned anew, or kept."""
    system, is_replanned = DRIFTING[name]
    first = traces[0]
    everything = first.everything.sample(1.0)
    problems = [trace.problem() for trace in traces]
    rates = [problem.sample.rate_per_s * scale for problem in problems]
    stream = _stream(traces, rates, minute_s, seed)
    problem = problems[0].at(rates[0])
    epochs = [_Epoch(0.0, "", system(problem, target))]
    if is_replanned:
        epochs += _replans(first, system, target, problem.sample, stream, minute_s, seed)
    limits_s = [
        setup.FIXED_SLO_SCALE * single_request_s(each, stand_alone_tier(each.sample, target)) for each in problems
    ]
    latencies_s, scores = _serve_epochs(everything, problem, epochs, stream, seed)
    in_time = latencies_s <= np.array(limits_s)[stream.segments]
    of_segment = [stream.segments == number for number in range(len(traces))]
    return Drifted(
        name=name,
        scale=scale,
        minute_s=minute_s,
        target=target,
        seed=seed,
        switches=tuple((epoch.at_s / minute_s, epoch.why) for epoch in epochs[1:]),
        in_time_per_s=float(in_time.sum() / stream.seconds),
        offered_per_s=float(len(in_time) / stream.seconds),
        p95_s=float(np.quantile(latencies_s, 0.95)),
        quality=float(scores.mean()),
        segment_in_time=tuple(float(in_time[here].mean()) for here in of_segment),
        segment_quality=tuple(float(scores[here].mean()) for here in of_segment),
    )


def _stream(traces: Sequence[Workload], rates: Sequence[float], minute_s: float, seed: int) -> _Stream:
    times: list[NDArray[np.float64]] = []
    rows: list[NDArray[np.intp]] = []
    segments: list[NDArray[np.intp]] = []
    start_s = 0.0
    for number, (trace, rate, minutes) in enumerate(zip(traces, rates, setup.DRIFT_MINUTES, strict=True)):
        rng = np.random.default_rng((seed, number))
        seconds = minutes * minute_s
        count = round(rate * seconds)
        times.append(start_s + np.sort(rng.uniform(0, seconds, count)))
        rows.append(trace.answers.questions[rng.integers(0, len(trace.answers.questions), count)])
        segments.append(np.full(count, number))
        start_s += seconds
    return _Stream(DrawnRequests(np.concatenate(times), np.concatenate(rows)), np.concatenate(segments), start_s)


def _replans(
    first: Workload,
    system: System,
    target: float,
    planned_for: CascadeSample,
    stream: _Stream,
    minute_s: float,
    seed: int,
) -> list[_Epoch]:
    settings = DriftSettings()
    detector = DriftDetector(_summary(planned_for, planned_for.rate_per_s), settings)
    everything = first.everything.sample(1.0)
    rng = np.random.default_rng((seed, 99))
    windows: list[NDArray[np.intp]] = []
    found: list[_Epoch] = []
    for minute in range(round(stream.seconds / minute_s)):
        within = (stream.arrivals.times_s >= minute * minute_s) & (stream.arrivals.times_s < (minute + 1) * minute_s)
        rows = stream.arrivals.rows[within]
        if not len(rows):
            continue
        windows.append(rng.choice(rows, min(setup.WINDOW_REQUESTS, len(rows)), replace=False))
        rate = len(rows) / minute_s
        why = detector.observe(_summary(_rows(everything, windows[-1], rate), rate))
        if not why:
            continue
        recent = _rows(everything, np.concatenate(windows[-settings.windows :]), rate)
        try:
            deployed = system(first.problem_of(recent), target)
        except PlanInfeasible:
            detector.on_plan_refused()
            continue
        detector.on_new_plan(_summary(recent, rate))
        found.append(_Epoch((minute + 1 + setup.SWITCH_MINUTES) * minute_s, why, deployed))
    return found


def _rows(everything: CascadeSample, rows: NDArray[np.intp], rate_per_s: float) -> CascadeSample:
    return CascadeSample(
        everything.scores[rows], everything.input_tokens[rows], everything.output_tokens[rows], rate_per_s
    )


def _summary(sample: CascadeSample, rate_per_s: float) -> WorkloadSummary:
    return WorkloadSummary(
        rate_per_s=rate_per_s,
        input_tokens=float(sample.input_tokens.mean()),
        output_tokens=tuple(sample.output_tokens.mean(axis=0).tolist()),
        scores=tuple(sample.scores.mean(axis=0).tolist()),
        requests=sample.requests,
    )


def _serve_epochs(
    everything: CascadeSample,
    problem: PlanningProblem,
    epochs: Sequence[_Epoch],
    stream: _Stream,
    seed: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    starts = [epoch.at_s for epoch in epochs]
    epoch_of = np.searchsorted(starts, stream.arrivals.times_s, side="right") - 1
    latencies_s, scores = np.zeros(len(epoch_of)), np.zeros(len(epoch_of))
    sample = replace(everything, rate_per_s=problem.sample.rate_per_s)
    for number, epoch in enumerate(epochs):
        here = np.flatnonzero(epoch_of == number)
        if not len(here):
            continue
        part = DrawnRequests(stream.arrivals.times_s[here], stream.arrivals.rows[here])
        served = serve(sample, problem.tiers, epoch.deployed, part, problem.judge_s, seed)
        latencies_s[here], scores[here] = served.latencies_s, served.scores
    return latencies_s, scores
