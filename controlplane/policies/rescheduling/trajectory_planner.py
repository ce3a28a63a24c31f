"""Which running request to move where, by the milliseconds that it saves everybody until the last predicted end.

    worth = time of all requests at the source and the target as they are - the same after the move
            - pause and transfer of the request

The time of all is a function of where each request is. A move is made where it lowers that function by more than it
costs and a floor, so under unchanged predictions no sequence of moves comes back to where it began.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.decode_load import UNKNOWN, DecodeLoad
from controlplane.policies.rescheduling.everybodys_time import EverybodysTime, TimeOfAll
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance, DecodeInstance, Idle, Rescheduling
from controlplane.policies.rescheduling.rescheduler import NOWHERE, UNKNOWN_STEPS
from controlplane.policies.rescheduling.selection import Floats, Rows, best_moves, cut_off
from controlplane.policies.rescheduling.trajectories import SHARES, Spans, Trajectory, of_instances, of_requests

MOST_ENDS: Final = 8
"""Sources, and targets, that are looked at in an interval: those where a request more costs most, and least."""
GONE: Final = -1
"""Row of an instance that is not there."""


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    """All running requests, those of one instance side by side; arrays of shape (requests,)."""

    ids: list[str]
    """In the order in which instances told of them."""
    frontends: list[str]
    """Likewise."""
    reported: Rows
    """Where each is in that order."""
    homes: Rows
    """Row of the instance where each is, or will be as soon as its move ends."""
    context: NDArray[np.int64]
    ends: Floats
    """Quantiles of what remains, shape (requests, 3)."""


class TrajectoryPlanner:
    """Decides by one set of parameters; remembers nothing between intervals."""

    mode: Final = ReschedulerMode.TRAJECTORIES

    def __init__(self, parameters: ReschedulerParameters | None = None) -> None:
        self.parameters = parameters or ReschedulerParameters()

    def decide(
        self,
        instances: Sequence[DecodeInstance],
        moving: Sequence[MigrationOrder] = (),
        held: Collection[str] = (),
        unreachable: Mapping[str, frozenset[str]] = NOWHERE,
        left: Mapping[str, frozenset[str]] = NOWHERE,
    ) -> Rescheduling:
        """The orders of this interval, best first; the arguments are those of `Rescheduler.decide`."""
        if not instances:
            return Rescheduling(self.mode, (), (), (), (), 0, None)
        running = _running(instances, moving)
        spans = Spans.until(float(running.ends.max(initial=1.0)), self.parameters.foresight_steps)
        loads = of_instances(running.context, running.ends, running.homes, len(instances), spans)
        time = EverybodysTime.of(instances, self.parameters.memory_fraction)
        present: Floats = np.bincount(running.homes, running.context, len(instances)).astype(np.float64)
        as_is = time.of_load(loads, spans)
        sources, targets = self._ends(instances, loads, time, as_is, spans)

        staying = {order.request_id for order in moving}.union(held)
        at_sources = np.flatnonzero(np.isin(running.homes, sources))
        movable = [running.ids[row] not in staying for row in running.reported[at_sources].tolist()]
        rows = at_sources[np.array(movable, dtype=np.bool_)]
        ids = [running.ids[row] for row in running.reported[rows].tolist()]
        frontends = [running.frontends[row] for row in running.reported[rows].tolist()]
        saved, cost = self._saved_ms(running, rows, targets, loads, time, as_is, spans)
        worth = saved - cost
        names = [instance.instance_id for instance in instances]
        target_names = [names[row] for row in targets.tolist()]
        closed = targets[:, None] == running.homes[rows]
        room = time.room_tokens[targets] - present[targets][:, None]
        closed |= running.context[rows] > room
        closed |= cut_off(target_names, frontends, unreachable)
        closed |= cut_off(target_names, ids, left)
        opened = np.where(closed, -np.inf, worth)
        gains = np.where(opened < self.parameters.floor_ms, -np.inf, opened)
        chosen = best_moves(gains, running.homes[rows], targets, self.parameters.migrations)
        orders = tuple(
            self._order(
                names[running.homes[rows[at]]],
                names[target],
                ids[at],
                float(worth[np.flatnonzero(targets == target)[0], at] + cost[at]),
                float(cost[at]),
            )
            for at, target, _ in chosen
        )
        return Rescheduling(
            mode=self.mode,
            orders=orders,
            gains=tuple(gain for _, _, gain in chosen),
            overloaded=tuple(names[row] for row in sources.tolist()),
            underloaded=tuple(target_names),
            candidates=int(np.isfinite(gains).sum()),
            balance=_balance(present, loads, spans),
            idle=None if chosen else _idle(targets, opened),
        )

    def joining_ms(self, instances: Sequence[DecodeInstance], context_tokens: int, expected: Floats) -> Floats:
        """What a request that begins to decode costs all on each instance, itself included, shape (instances,): the
        same worth chooses where it begins.

        It is taken to run as long as those that run do on average, since nothing is predicted of it yet.
        `expected` requests like it are on their way to each instance, shape (instances,).
        """
        running = _running(instances, ())
        ends = (
            running.ends.mean(axis=0, keepdims=True) if len(running.ends) else np.full((1, len(SHARES)), UNKNOWN_STEPS)
        )
        spans = Spans.until(float(max(running.ends.max(initial=1.0), ends.max())), self.parameters.foresight_steps)
        joining = of_requests(np.array([context_tokens]), ends, spans)
        coming = expected[:, None]
        loads = of_instances(running.context, running.ends, running.homes, len(instances), spans)
        loads = loads + Trajectory(joining.requests * coming, joining.tokens * coming, joining.variance * coming)
        time = EverybodysTime.of(instances, self.parameters.memory_fraction)
        cost: Floats = (time.of_load(loads + joining, spans) - time.of_load(loads, spans)).total_ms
        return cost

    def _ends(
        self,
        instances: Sequence[DecodeInstance],
        loads: Trajectory,
        time: EverybodysTime,
        as_is: TimeOfAll,
        spans: Spans,
    ) -> tuple[Rows, Rows]:
        """Sources and targets, by what another request of the usual kind would cost all on each instance."""
        count = len(instances)
        usual = Trajectory(*(each.sum(axis=0) for each in (loads.requests, loads.tokens, loads.variance)))
        requests = max(1.0, float(loads.requests[:, 0].sum()))
        usual = Trajectory(usual.requests / requests, usual.tokens / requests, usual.variance / requests)
        price = (time.of_load(loads + usual, spans) - as_is).total_ms
        order = np.argsort(price, kind="stable")
        may_receive = np.array([instance.may_receive for instance in instances])
        targets = order[may_receive[order]][:MOST_ENDS]
        sources = order[::-1][: min(MOST_ENDS, count)]
        return np.sort(sources), np.sort(targets)

    def _saved_ms(
        self,
        running: _Running,
        rows: Rows,
        targets: Rows,
        loads: Trajectory,
        time: EverybodysTime,
        as_is: TimeOfAll,
        spans: Spans,
    ) -> tuple[Floats, Floats]:
        """What each move saves, shape (targets, requests), and costs, shape (requests,)."""
        homes = running.homes[rows]
        moved = of_requests(running.context[rows], running.ends[rows], spans)
        token_ms = self.parameters.migration_token_us / 1000
        cost: Floats = self.parameters.migration_fixed_ms + token_ms * running.context[rows].astype(np.float64)
        relief = as_is[homes] - time[homes].of_load(loads[homes] - moved, spans)
        burden = time[targets, None].of_load(loads[targets, None] + moved, spans) - as_is[targets, None]
        # Nothing is saved before the request has come: neither is anything where it ends before that.
        each_step = np.maximum(relief.step_ms - burden.step_ms, 0.0)
        steps = cost / time.step_ms(loads)[homes, 0]
        saved: Floats = relief.total_ms - burden.total_ms - each_step * steps
        saved[:, running.ends[rows] @ SHARES <= steps] = -np.inf
        return saved, cost

    def _order(self, source: str, target: str, request_id: str, saved_ms: float, cost_ms: float) -> MigrationOrder:
        reason = f"{self.mode}: moves to {target}: saves {saved_ms:.0f} ms, costs {cost_ms:.0f} ms"
        return MigrationOrder(request_id, source, target, reason)


def _running(instances: Sequence[DecodeInstance], moving: Sequence[MigrationOrder]) -> _Running:
    """Requests that are under way count where they go, unless that instance tells of them already."""
    loads = [instance.load for instance in instances]
    counts = [len(load.request_ids) for load in loads]
    starts = np.cumsum([0, *counts]).tolist()
    homes = np.repeat(np.arange(len(instances)), counts)
    rows = {instance.instance_id: row for row, instance in enumerate(instances)}
    for order in moving:
        source, target = rows.get(order.source_instance_id, GONE), rows.get(order.target_instance_id, GONE)
        if source == GONE or order.request_id not in loads[source].request_ids:
            continue
        is_told_of = target != GONE and order.request_id in loads[target].request_ids
        homes[starts[source] + loads[source].request_ids.index(order.request_id)] = GONE if is_told_of else target
    order_of_homes = np.argsort(homes, kind="stable")
    kept = order_of_homes[np.searchsorted(homes[order_of_homes], 0) :]
    frontends = (load.frontends or repeat("", len(load.request_ids)) for load in loads)
    return _Running(
        list(chain.from_iterable(load.request_ids for load in loads)),
        list(chain.from_iterable(frontends)),
        kept,
        homes[kept],
        np.concatenate([load.context_tokens for load in loads])[kept],
        _quantiles(loads, starts)[kept],
    )


def _quantiles(loads: Sequence[DecodeLoad], starts: Sequence[int]) -> Floats:
    """Of what remains, shape (requests, 3)."""
    remaining = np.concatenate([load.remaining_tokens for load in loads])
    middle = np.where(remaining == UNKNOWN, UNKNOWN_STEPS, remaining).astype(np.float64)
    ends = np.repeat(middle[:, None], len(SHARES), axis=1)
    for load, start in zip(loads, starts, strict=False):
        if load.band_tokens is not None:
            low, high = load.band_tokens
            ends[start : start + len(low), 0] = low
            ends[start : start + len(high), 2] = high
    np.minimum(ends[:, 0], middle, out=ends[:, 0])
    np.maximum(ends[:, 2], middle, out=ends[:, 2])
    return ends


def _balance(present: Floats, loads: Trajectory, spans: Spans) -> Balance:
    expected = float(loads.tokens.var(axis=0) @ spans.weights / spans.weights.sum())
    return Balance(float(present.mean()), float(present.var()), expected)


def _idle(targets: Rows, opened: Floats) -> Idle:
    """`opened`: what each move is worth, -inf where it is not open."""
    if not targets.size:
        return Idle.NO_TARGET
    if not opened.size:
        return Idle.NOT_WORTH_IT
    return Idle.NOT_WORTH_IT if np.isfinite(opened).any() else Idle.NO_ROOM
