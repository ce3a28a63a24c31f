"""A workload replayed under scalers: what each costs and how much of the SLO it keeps (pure)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.autoscale.capacity import CapacityCurve, replicas_for
from simulator.autoscale.mesh import FluidMesh, StartUp
from simulator.autoscale.optimum import optimum
from simulator.autoscale.scalers import Scaler

STEP_S = 15.0
BIN_S = 60.0
"""In which the optimum decides."""


@dataclass(frozen=True, slots=True)
class Span:
    """The part of a replay that counts, in steps; what comes before is history."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """Of the counted part."""

    replica_hours: float
    kept_share: float
    requests: int
    most: int
    least: int
    changes: int
    """How often the number of replicas was changed."""


def replay(
    arrivals: NDArray[np.int64],
    spans: tuple[Span, ...],
    curve: CapacityCurve,
    times: StartUp,
    share: float,
    scaler: Scaler,
) -> tuple[Replayed, ...]:
    """Run through all arrivals once, and report each span. It begins with what the first minute needs."""
    first = int(arrivals[: max(1, int(BIN_S / STEP_S))].sum())
    mesh = FluidMesh(curve, times, STEP_S, max(1, replicas_for(first / BIN_S, curve.capacity_per_s(share))))
    paid, came, kept = (np.zeros(len(arrivals)) for _ in range(3))
    wanted = np.zeros(len(arrivals), np.int64)
    for step, count in enumerate(arrivals.tolist()):
        before_s = mesh.replica_s
        came[step], kept[step] = mesh.advance(count)
        paid[step] = mesh.replica_s - before_s
        mesh.scale(scaler.wanted(mesh.state, count, float(kept[step])))
        wanted[step] = mesh.wanted
    return tuple(_of_span(span, paid, came, kept, wanted) for span in spans)


def _of_span(
    span: Span,
    paid: NDArray[np.float64],
    came: NDArray[np.float64],
    kept: NDArray[np.float64],
    wanted: NDArray[np.int64],
) -> Replayed:
    part = slice(span.start, span.end)
    return Replayed(
        replica_hours=float(paid[part].sum()) / 3600,
        kept_share=float(kept[part].sum() / max(1.0, came[part].sum())),
        requests=int(came[part].sum()),
        most=int(wanted[part].max()),
        least=int(wanted[part].min()),
        changes=int((np.diff(wanted[part]) != 0).sum()),
    )


def best_with_hindsight(
    arrivals: NDArray[np.int64],
    span: Span,
    curve: CapacityCurve,
    times: StartUp,
    share: float,
    minimum: int,
    maximum: int,
) -> Replayed:
    """The optimum of a span."""
    steps = int(BIN_S / STEP_S)
    counted = arrivals[span.start : span.end]
    bins = counted[: len(counted) // steps * steps].reshape(-1, steps).sum(axis=1)
    found = optimum(bins, BIN_S, curve, times, share, minimum, maximum)
    return Replayed(
        replica_hours=found.replica_s / 3600,
        kept_share=found.kept_share,
        requests=int(bins.sum()),
        most=int(found.replicas.max()),
        least=int(found.replicas.min()),
        changes=int((np.diff(found.replicas) != 0).sum()),
    )


def cheapest_target(
    targets: tuple[float, ...],
    make: Callable[[float], Scaler],
    arrivals: NDArray[np.int64],
    history: Span,
    curve: CapacityCurve,
    times: StartUp,
    share: float,
) -> float:
    """Of a rival's targets: the one that keeps the SLO at the least cost over the history; the first, which is to be
    the most careful one, where none does."""
    best, cost = targets[0], float("inf")
    for target in targets:
        (found,) = replay(arrivals[: history.end], (history,), curve, times, share, make(target))
        if found.kept_share >= share and found.replica_hours < cost:
            best, cost = target, found.replica_hours
    return best
