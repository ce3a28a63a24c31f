"""STAR's Algorithm 1, the scheduler's half: which running request to move where, if any.

The variance of the loads changes only through the source s and the target u when a request with the load x_t moves,
and their sum not at all, so with n instances

    delta Var_t = 2/n * (x_t^2 + x_t L_u,t - x_t L_s,t)

whose weighted sum over t splits into a term of the request, one of request and source, and x (beta o L_u)^T: one
matrix product for all candidates. Memory safety needs no horizon either: a request's load rises by one a step until
it ends, so what counts is the running maximum of L_u,t + t up to its last point. In all O(|O| |U| R H), most of it
in BLAS.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.decode_load import UNKNOWN, last_point, profiles
from controlplane.policies.rescheduling.parameters import Horizon, ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance, DecodeInstance, Rescheduling, load_matrix

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]

PRESENT = Horizon(steps=0, stride_tokens=1)
NOWHERE: Mapping[str, frozenset[str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class _Requests:
    """Requests of overloaded instances that are worth moving, grouped by source; arrays of shape (requests,)."""

    ids: tuple[str, ...]
    source: Rows
    context: NDArray[np.int64]
    last: NDArray[np.int64]
    """Last point of the horizon at which the request is still there."""
    profile: Floats
    """Shape (requests, points)."""
    frontends: tuple[str, ...]
    """Of each; "" where it is not known."""


class Rescheduler:
    """Decides by one mode with one set of parameters; remembers nothing between intervals."""

    def __init__(self, mode: ReschedulerMode, parameters: ReschedulerParameters | None = None) -> None:
        self.mode = mode
        self.parameters = parameters or ReschedulerParameters()
        predicts = mode is ReschedulerMode.PREDICTED
        self._horizon = self.parameters.horizon if predicts else PRESENT
        self._beta = self.parameters.beta() if predicts else np.zeros(0)
        self._weights: Floats = np.concatenate(([1.0], self._beta))
        """Of equation (4): the present counts once, the horizon once in all."""

    def decide(
        self,
        instances: Sequence[DecodeInstance],
        moving: Sequence[MigrationOrder] = (),
        held: Collection[str] = (),
        unreachable: Mapping[str, frozenset[str]] = NOWHERE,
    ) -> Rescheduling:
        """The orders of this interval, best first. `moving` are orders that are under way: their requests count at
        their targets already and are not moved again; neither are those that are `held`. `unreachable` are, by
        frontend, the instances that it has no stream to: its requests are not moved there.

        In mode `predicted` every load must have been made with the horizon of the parameters.
        """
        if self.mode is ReschedulerMode.OFF or not instances:
            return Rescheduling(self.mode, (), (), (), (), 0, None)
        loads = load_matrix(instances, self._horizon.points)
        self._count_moving(instances, loads, moving)
        overloaded, underloaded = self._classify(instances, loads)
        names = [instance.instance_id for instance in instances]
        requests = self._worth_moving(instances, overloaded, {order.request_id for order in moving}.union(held))
        gains = self._gains(instances, loads, requests, underloaded)
        if unreachable:
            gains[_cut_off([names[row] for row in underloaded.tolist()], requests.frontends, unreachable)] = -np.inf
        chosen = self._select(gains, requests, underloaded)
        balance = self._balance(loads)
        return Rescheduling(
            mode=self.mode,
            orders=tuple(
                self._order(names, loads, requests, row, target, balance, gain) for row, target, gain in chosen
            ),
            gains=tuple(gain for _, _, gain in chosen),
            overloaded=tuple(names[row] for row in overloaded.tolist()),
            underloaded=tuple(names[row] for row in underloaded.tolist()),
            candidates=int(np.isfinite(gains).sum()),
            balance=balance,
        )

    # -- phase 1: instance classification, lines 11 to 16

    def _classify(self, instances: Sequence[DecodeInstance], loads: Floats) -> tuple[Rows, Rows]:
        workloads = loads[:, 1:] @ self._beta if len(self._beta) else loads[:, 0]
        bound = (1 + self.parameters.theta) * workloads.mean()
        may_receive = np.array([instance.may_receive for instance in instances])
        return np.flatnonzero(workloads > bound), np.flatnonzero((loads[:, 0] < bound) & may_receive)

    # -- phase 2: candidate enumeration, lines 17 to 23

    def _worth_moving(self, instances: Sequence[DecodeInstance], overloaded: Rows, staying: set[str]) -> _Requests:
        """Line 20: requests that will still run for longer than their migration takes. Without predictions all."""
        sources = [(row, instances[row]) for row in overloaded.tolist()]
        counts = [len(instance.load.request_ids) for _, instance in sources]
        ids = tuple(each for _, instance in sources for each in instance.load.request_ids)
        context = _joined([instance.load.context_tokens for _, instance in sources])
        remaining = _joined([instance.load.remaining_tokens for _, instance in sources])
        keep = np.fromiter((each not in staying for each in ids), dtype=np.bool_, count=len(ids))
        if self.mode is ReschedulerMode.PREDICTED:
            step_ms = np.repeat(np.array([instance.step_ms for _, instance in sources]), counts)
            migration_ms = self.parameters.migration_fixed_ms + self.parameters.migration_token_us / 1000 * context
            keep &= (remaining != UNKNOWN) & (remaining * step_ms > migration_ms)
        frontends = tuple(
            frontend
            for _, instance in sources
            for frontend in (instance.load.frontends or ("",) * len(instance.load.request_ids))
        )
        rows = np.flatnonzero(keep)
        context, remaining = context[rows], remaining[rows]
        return _Requests(
            ids=tuple(ids[row] for row in rows.tolist()),
            source=np.repeat(overloaded, counts)[rows],
            context=context,
            last=last_point(remaining, self._horizon),
            profile=profiles(context, remaining, self._horizon).astype(np.float64),
            frontends=tuple(frontends[row] for row in rows.tolist()),
        )

    def _fits(
        self, instances: Sequence[DecodeInstance], loads: Floats, requests: _Requests, targets: Rows
    ) -> NDArray[np.bool_]:
        """Line 21, read over the horizon: at no point until the request ends may it and what is on the target then
        exceed the target's memory. Shape (targets, requests)."""
        capacity = (
            np.array([instances[row].capacity_tokens for row in targets.tolist()]) * self.parameters.memory_fraction
        )
        peak = np.maximum.accumulate(loads[targets] + self._horizon.ahead_tokens(), axis=1)
        fits: NDArray[np.bool_] = (capacity[:, None] - peak)[:, requests.last] >= requests.context
        return fits

    # -- phase 3: best feasible selection, lines 24 to 34

    def _gains(self, instances: Sequence[DecodeInstance], loads: Floats, requests: _Requests, targets: Rows) -> Floats:
        """By how much each candidate lowers equation (4), shape (targets, requests); -inf where it may not move."""
        weighted = requests.profile * self._weights
        of_request = np.einsum("rt,rt->r", weighted, loads[requests.source] - requests.profile)
        gains: Floats = of_request - loads[targets] @ weighted.T
        gains *= 2 / len(loads)
        gains[~self._fits(instances, loads, requests, targets)] = -np.inf
        gains[targets[:, None] == requests.source] = -np.inf
        return gains

    def _select(self, gains: Floats, requests: _Requests, targets: Rows) -> list[tuple[int, int, float]]:
        """(request, target, gain) of the best candidate, then of the best that shares no instance with it, and so
        on. Moves between disjoint pairs do not change each other's gain, so one matrix serves them all."""
        chosen: list[tuple[int, int, float]] = []
        if not gains.size:
            return chosen
        sources, starts = np.unique(requests.source, return_index=True)
        best = np.maximum.reduceat(gains, starts, axis=1)
        ends = np.append(starts[1:], len(requests.ids))
        while len(chosen) < self.parameters.migrations:
            target, source = divmod(int(best.argmax()), len(sources))
            gain = float(best[target, source])
            if not gain > 0:
                break
            row = int(starts[source]) + int(gains[target, starts[source] : ends[source]].argmax())
            chosen.append((row, int(targets[target]), gain))
            used = (sources[source], targets[target])
            best[np.isin(targets, used)] = -np.inf
            best[:, np.isin(sources, used)] = -np.inf
        return chosen

    # -- around them

    def _count_moving(
        self, instances: Sequence[DecodeInstance], loads: Floats, moving: Sequence[MigrationOrder]
    ) -> None:
        """Let requests that are on their way count where they go, unless the reports say so already."""
        rows = {instance.instance_id: row for row, instance in enumerate(instances)}
        for order in moving:
            source = rows.get(order.source_instance_id)
            if source is None or order.request_id not in instances[source].load.request_ids:
                continue
            load = instances[source].load
            at = load.request_ids.index(order.request_id)
            profile = profiles(load.context_tokens[at : at + 1], load.remaining_tokens[at : at + 1], self._horizon)[0]
            loads[source] -= profile
            target = rows.get(order.target_instance_id)
            if target is not None and order.request_id not in instances[target].load.request_ids:
                loads[target] += profile

    def _balance(self, loads: Floats) -> Balance:
        variances = loads.var(axis=0)
        return Balance(float(loads[:, 0].mean()), float(variances[0]), float(variances @ self._weights))

    def _order(
        self,
        names: Sequence[str],
        loads: Floats,
        requests: _Requests,
        row: int,
        target: int,
        balance: Balance,
        gain: float,
    ) -> MigrationOrder:
        source = int(requests.source[row])
        share = 100 * gain / balance.expected_variance
        reason = (
            f"{self.mode}: {names[source]} carries {loads[source, 0]:.0f} tokens and {names[target]} "
            f"{loads[target, 0]:.0f}, the mean is {balance.mean_tokens:.0f}; moving {requests.context[row]} lowers "
            f"the {'expected ' if len(self._beta) else ''}variance by {share:.1f} %"
        )
        return MigrationOrder(requests.ids[row], names[source], names[target], reason)


def _cut_off(
    targets: Sequence[str], frontends: Sequence[str], unreachable: Mapping[str, frozenset[str]]
) -> NDArray[np.bool_]:
    """Whether the request's frontend cannot reach the target, shape (targets, requests)."""
    numbers = {frontend: number for number, frontend in enumerate(dict.fromkeys(frontends))}
    cut = np.array(
        [[target in unreachable.get(frontend, frozenset()) for frontend in numbers] for target in targets],
        dtype=np.bool_,
    ).reshape(len(targets), len(numbers))
    of_requests: NDArray[np.bool_] = cut[:, [numbers[frontend] for frontend in frontends]]
    return of_requests


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
