"""STAR's Algorithm 1, the scheduler's half: which running request to move where, if any.

The variance of the loads changes only through the source s and the target u when a request with the load x_t moves,
and their sum not at all, so with n instances

    delta Var_t = 2/n * (x_t^2 + x_t L_u,t - x_t L_s,t)

whose weighted sum over t splits into a term of the request, one of request and source, and x (beta o L_u)^T: one
matrix product for all candidates. Memory safety needs no horizon either: a request's load rises by one a step until
it ends, so what counts is the running maximum of L_u,t + t up to its last point. In all O(|O| |U| R H), most of it
in BLAS.

Four things are not in the paper. Line 15 compares an instance's present load with the mean load of the horizon: here
both sides are of the horizon, w_i of line 13. The horizon reaches no further than the longest request is predicted to
run. Taken literally, answers of a few hundred tokens are never moved, because hardly anything is left at most points of
the horizon: of 50 draws of four instances with 48, 32, 24 and 16 such requests none brought an order, and all do so. A
move must save those who stay behind as much time as it takes. And no request returns to where it was moved from.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from controlplane.model.migration_order import MigrationOrder
from controlplane.policies.rescheduling.decode_load import UNKNOWN, last_point, profiles
from controlplane.policies.rescheduling.parameters import Horizon, ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import Balance, DecodeInstance, Idle, Rescheduling, load_matrix
from controlplane.policies.rescheduling.selection import Floats, Rows, best_moves, cut_off

PRESENT = Horizon(steps=0, stride_tokens=1)
UNKNOWN_STEPS: Final = 256
"""For how long a request without a prediction is taken to run on."""
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
        self._predicts = mode is ReschedulerMode.PREDICTED
        self._beta = self.parameters.beta() if self._predicts else np.zeros(0)
        self._weights: Floats = np.concatenate(([1.0], self._beta))
        """Of equation (4): the present counts once, the horizon once in all."""

    def decide(
        self,
        instances: Sequence[DecodeInstance],
        moving: Sequence[MigrationOrder] = (),
        held: Collection[str] = (),
        unreachable: Mapping[str, frozenset[str]] = NOWHERE,
        left: Mapping[str, frozenset[str]] = NOWHERE,
    ) -> Rescheduling:
        """The orders of this interval, best first. `moving` are orders that are under way: their requests count at
        their targets already and are not moved again; neither are those that are `held`. `unreachable` are, by
        frontend, the instances that it has no stream to: its requests are not moved there. `left` are, by request, the
        instances that it was moved away from: it does not go back.

        In mode `predicted` all loads must have been made over one horizon, of as many points as the parameters say.
        """
        if self.mode is ReschedulerMode.OFF or not instances:
            return Rescheduling(self.mode, (), (), (), (), 0, None)
        horizon = instances[0].load.horizon if self._predicts else PRESENT
        loads = load_matrix(instances, horizon)
        self._count_moving(instances, loads, moving, horizon)
        overloaded, underloaded = self._classify(instances, loads)
        names = [instance.instance_id for instance in instances]
        staying = {order.request_id for order in moving}.union(held)
        requests = self._worth_moving(instances, loads, overloaded, staying, horizon)
        gains = self._gains(instances, loads, requests, underloaded, horizon)
        targets = [names[row] for row in underloaded.tolist()]
        if unreachable:
            gains[cut_off(targets, requests.frontends, unreachable)] = -np.inf
        if left:
            gains[cut_off(targets, requests.ids, left)] = -np.inf
        chosen = best_moves(gains, requests.source, underloaded, self.parameters.migrations)
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
            idle=None if chosen else _idle(overloaded, underloaded, requests, gains),
        )

    # -- phase 1: instance classification, lines 11 to 16

    def _classify(self, instances: Sequence[DecodeInstance], loads: Floats) -> tuple[Rows, Rows]:
        workloads = loads[:, 1:] @ self._beta if self._predicts else loads[:, 0]
        bound = (1 + self.parameters.theta) * workloads.mean()
        may_receive = np.array([instance.may_receive for instance in instances])
        return np.flatnonzero(workloads > bound), np.flatnonzero((workloads < bound) & may_receive)

    # -- phase 2: candidate enumeration, lines 17 to 23

    def _worth_moving(
        self,
        instances: Sequence[DecodeInstance],
        loads: Floats,
        overloaded: Rows,
        staying: set[str],
        horizon: Horizon,
    ) -> _Requests:
        """Line 20: requests that will still run for longer than their migration takes, without predictions all; and of
        these the ones that cost those who run beside them as much time, unless their instance runs out of memory."""
        sources = [(row, instances[row]) for row in overloaded.tolist()]
        counts = [len(instance.load.request_ids) for _, instance in sources]
        ids = tuple(each for _, instance in sources for each in instance.load.request_ids)
        context = _joined([instance.load.context_tokens for _, instance in sources])
        remaining = _joined([instance.load.remaining_tokens for _, instance in sources])
        keep = np.fromiter((each not in staying for each in ids), dtype=np.bool_, count=len(ids))
        migration_ms = self.parameters.migration_fixed_ms + self.parameters.migration_token_us / 1000 * context
        if self._predicts:
            step_ms = np.repeat(np.array([instance.step_ms for _, instance in sources]), counts)
            keep &= (remaining != UNKNOWN) & (remaining * step_ms > migration_ms)
        keep &= self._relief_ms(sources, loads, context, remaining) >= migration_ms
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
            last=last_point(remaining, horizon),
            profile=profiles(context, remaining, horizon).astype(np.float64),
            frontends=tuple(frontends[row] for row in rows.tolist()),
        )

    def _relief_ms(
        self,
        sources: Sequence[tuple[int, DecodeInstance]],
        loads: Floats,
        context: NDArray[np.int64],
        remaining: NDArray[np.int64],
    ) -> Floats:
        """What all others on its instance save together, for as long as the request would run on, if it leaves; shape
        (requests,). Without limit where nobody knows what a token costs, and where the instance's memory runs out."""
        per_step = [_relief_of_token_ms(instance, loads[row], self.parameters) for row, instance in sources]
        counts = [len(instance.load.request_ids) for _, instance in sources]
        steps = np.where(remaining == UNKNOWN, UNKNOWN_STEPS, np.maximum(remaining, 1))
        relief: Floats = np.repeat(np.array(per_step, dtype=np.float64), counts) * context * steps
        return relief

    def _fits(
        self, instances: Sequence[DecodeInstance], loads: Floats, requests: _Requests, targets: Rows, horizon: Horizon
    ) -> NDArray[np.bool_]:
        """Line 21, read over the horizon: at no point until the request ends may it and what is on the target then
        exceed the target's memory. Shape (targets, requests)."""
        capacity = (
            np.array([instances[row].capacity_tokens for row in targets.tolist()]) * self.parameters.memory_fraction
        )
        peak = np.maximum.accumulate(loads[targets] + horizon.ahead_tokens(), axis=1)
        fits: NDArray[np.bool_] = (capacity[:, None] - peak)[:, requests.last] >= requests.context
        return fits

    # -- phase 3: best feasible selection, lines 24 to 34

    def _gains(
        self, instances: Sequence[DecodeInstance], loads: Floats, requests: _Requests, targets: Rows, horizon: Horizon
    ) -> Floats:
        """By how much each candidate lowers equation (4), shape (targets, requests); -inf where it may not move."""
        weighted = requests.profile * self._weights
        of_request = np.einsum("rt,rt->r", weighted, loads[requests.source] - requests.profile)
        gains: Floats = of_request - loads[targets] @ weighted.T
        gains *= 2 / len(loads)
        gains[~self._fits(instances, loads, requests, targets, horizon)] = -np.inf
        gains[targets[:, None] == requests.source] = -np.inf
        return gains

    # -- around them

    def _count_moving(
        self, instances: Sequence[DecodeInstance], loads: Floats, moving: Sequence[MigrationOrder], horizon: Horizon
    ) -> None:
        """Let requests that are on their way count where they go, unless the reports say so already."""
        rows = {instance.instance_id: row for row, instance in enumerate(instances)}
        for order in moving:
            source = rows.get(order.source_instance_id)
            if source is None or order.request_id not in instances[source].load.request_ids:
                continue
            load = instances[source].load
            at = load.request_ids.index(order.request_id)
            profile = profiles(load.context_tokens[at : at + 1], load.remaining_tokens[at : at + 1], horizon)[0]
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


def _relief_of_token_ms(instance: DecodeInstance, load: Floats, parameters: ReschedulerParameters) -> float:
    """What the other requests save in each step for each token of context that leaves."""
    runs_out = load.max() > parameters.memory_fraction * instance.capacity_tokens
    if instance.costs is None or runs_out:
        return np.inf
    return instance.costs.context_token_ms * (len(instance.load.request_ids) - 1)


def _idle(overloaded: Rows, underloaded: Rows, requests: _Requests, gains: Floats) -> Idle:
    if not overloaded.size:
        return Idle.BALANCED
    if not underloaded.size:
        return Idle.NO_TARGET
    if not requests.ids:
        return Idle.NOT_WORTH_IT
    return Idle.NO_GAIN if np.isfinite(gains).any() else Idle.NO_ROOM


def _joined(arrays: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
