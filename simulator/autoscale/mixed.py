"""A workload replayed on kinds of replica: what the cheapest mix of them costs, and each kind alone (pure).

The fluid model of `mesh` has one kind of replica. Here it counts units of capacity, the 64th part of the smallest
kind's; what was simulated of one replica is stretched to each kind's capacity: at the same part of it all are alike.
"""

from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.autoscale_record import AutoscalePolicy
from controlplane.model.replica_kind import KindReplicas, in_words
from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.planning.autoscale.mix import Bounds, Mix, cheapest_mix, standing_mix
from simulator.autoscale.mesh import FluidMesh, MeshState, StartUp
from simulator.autoscale.replay import BIN_S, STEP_S, Span
from simulator.autoscale.scalers import ManagerScaler

UNITS: Final = 64
"""Of the smallest kind: capacities are rounded to less than 1 %."""


@dataclass(frozen=True, slots=True)
class ReplayedMix:
    """Of the counted part, paid from the order to the end of the drain."""

    cost: float
    hours: dict[str, float]
    """Of replicas, by kind."""
    kept_share: float
    requests: int
    changes: int
    """How often the mix was changed."""


def replay_mix(
    arrivals: NDArray[np.int64], spans: tuple[Span, ...], curve: CapacityCurve, times: StartUp, policy: AutoscalePolicy
) -> tuple[ReplayedMix, ...]:
    """Under the manager, through all arrivals once; reports each span. It begins with what the first minute needs."""
    kinds = policy.kinds
    unit_per_s = min(kind.capacity_per_s for kind in kinds) / UNITS
    units = np.array([round(kind.capacity_per_s / unit_per_s) for kind in kinds])
    first_per_s = float(arrivals[: max(1, int(BIN_S / STEP_S))].sum()) / BIN_S
    bounds = Bounds(max(1, policy.minimum), policy.maximum, policy.budget_per_hour)
    counts = np.array(cheapest_mix(first_per_s, bounds, Mix(kinds, (0,) * len(kinds)), 0.0).counts)
    of_unit = _stretched(curve, unit_per_s / curve.capacity_per_s(policy.share))
    mesh = FluidMesh(of_unit, times, STEP_S, int(units @ counts))
    scaler = ManagerScaler(policy, None, _by_kind(policy, counts))
    paid_s = np.zeros((len(arrivals), len(kinds)))
    came, kept, changed = (np.zeros(len(arrivals)) for _ in range(3))
    for step, count in enumerate(arrivals.tolist()):
        came[step], kept[step] = mesh.advance(count)
        paid_s[step] += counts * STEP_S
        state = mesh.state
        replicas = int(counts.sum())
        serving = replicas if state.serving >= state.wanted else int(replicas * state.serving / state.wanted)
        seen = MeshState(state.now_s, replicas, serving, state.waiting, state.in_flight, state.utilisation)
        scaler.wanted(seen, count, float(kept[step]))
        now = np.array(standing_mix(kinds, scaler.kinds).counts)
        if (now != counts).any():
            changed[step] = 1
            paid_s[step] += np.maximum(0, counts - now) * times.drain_s
            mesh.scale(int(units @ now))
            counts = now
    return tuple(_of_span(slice(span.start, span.end), policy, paid_s, came, kept, changed) for span in spans)


def alone(policy: AutoscalePolicy) -> dict[str, AutoscalePolicy]:
    """The policy with each of its kinds alone, by the kind."""
    return {in_words(*kind.key): msgspec.structs.replace(policy, kinds=(kind,)) for kind in policy.kinds}


def _by_kind(policy: AutoscalePolicy, counts: NDArray[np.int64]) -> tuple[KindReplicas, ...]:
    return Mix(policy.kinds, tuple(counts.tolist())).by_kind


def _stretched(curve: CapacityCurve, factor: float) -> CapacityCurve:
    return CapacityCurve(
        tuple(rate * factor for rate in curve.rates_per_s),
        curve.shares,
        tuple(each * factor for each in curve.in_flight),
        curve.saturation_per_s * factor,
    )


def _of_span(
    part: slice,
    policy: AutoscalePolicy,
    paid_s: NDArray[np.float64],
    came: NDArray[np.float64],
    kept: NDArray[np.float64],
    changed: NDArray[np.float64],
) -> ReplayedMix:
    hours = paid_s[part].sum(axis=0) / 3600
    return ReplayedMix(
        cost=float(sum(n * kind.replica_price_per_hour for n, kind in zip(hours, policy.kinds, strict=True))),
        hours={in_words(*kind.key): float(n) for n, kind in zip(hours, policy.kinds, strict=True)},
        kept_share=float(kept[part].sum() / max(1.0, came[part].sum())),
        requests=int(came[part].sum()),
        changes=int(changed[part].sum()),
    )
