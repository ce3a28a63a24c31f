"""Latency tables of all tiers for any routing, from simulations for one.

Which requests reach a tier, and where it gives their answers up, changes their lengths, and with them the tier's
latency. Simulating every routing that a search looks at would take minutes; so the search scales the tables of the
last deployment by the work that the routing leaves per request, and each round of algorithm 1 simulates anew for the
routing it has found. At its fixed point nothing is scaled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.parallelism import Capacity, Mix, capacity
from controlplane.planning.cascade.replica import ReplicaCurve, Statistic
from controlplane.planning.cascade.routing import Routed
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.work import TierWork

TAIL = 0.95


class CurveSource(Protocol):
    """Source of replicas' latency curves, usually a simulation. Implementations cache what they have measured."""

    def curves(self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]) -> Sequence[ReplicaCurve]:
        """One curve for each shape that the tier's model fits on, for these requests of the sample, for each of which
        the tier generates so many tokens; shapes (requests,)."""
        ...

    def work(self, tier: int) -> TierWork:
        """What each request of the sample takes on the tier when it is alone there."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class TierTable:
    """One tier's capacity, for requests of a certain mean and tail of work."""

    tier: int
    capacity: Capacity
    work: TierWork
    mean_work_s: float
    tail_work_s: float
    judge_s: float
    """What a judgement takes: an answer is judged before it counts, unless it was given up or any score would do."""

    def latencies_s(self, routed: Routed, rate_per_s: float) -> NDArray[np.float64]:
        """l(f), f = 0..max, under this routing of a workload of this rate; zeros if no request reaches the tier.

        p95 or mean, whichever the capacity is of.
        """
        rate, stretch = self._scaled(routed, rate_per_s)
        if rate <= 0:
            return np.zeros(self.capacity.max_gpus + 1)
        return self.capacity.latencies_s(rate) * stretch + self._judged_s(routed)

    def latency_of_s(self, mix: Mix, routed: Routed, rate_per_s: float) -> float:
        """Latency of this mix under the routing; 0 if no request comes, infinite if it does not hold them."""
        rate, stretch = self._scaled(routed, rate_per_s)
        return self.capacity.latency_of_s(mix, rate) * stretch + self._judged_s(routed) if rate > 0 else 0.0

    def scaled_rate_per_s(self, routed: Routed, rate_per_s: float) -> float:
        """The rate of the table's own requests that means as much work."""
        return self._scaled(routed, rate_per_s)[0]

    def _judged_s(self, routed: Routed) -> float:
        """What judgements add: to a mean by the part of the answers that are written whole; to a p95 all of it, if any
        are, which is an upper bound."""
        if not routed.is_judged[self.tier]:
            return 0.0
        tokens, reached = routed.output_tokens[:, self.tier], routed.reached[:, self.tier]
        part = float((tokens == self.work.output_tokens)[reached].mean())
        return self.judge_s * (part if self.capacity.statistic == "mean" else float(part > 0))

    def _scaled(self, routed: Routed, rate_per_s: float) -> tuple[float, float]:
        reached = routed.reached[:, self.tier]
        work_s = self.work.seconds(routed.output_tokens[:, self.tier])[reached]
        if not len(work_s) or rate_per_s <= 0:
            return 0.0, 1.0
        more_work = float(work_s.mean()) / self.mean_work_s
        # A p95 goes with the long requests, a mean with all of them.
        stretch = more_work if self.capacity.statistic == "mean" else _tail_s(work_s) / self.tail_work_s
        return rate_per_s * float(reached.mean()) * more_work, stretch


def tier_tables(
    sample: CascadeSample,
    routed: Routed,
    source: CurveSource,
    gpus: int,
    judge_s: float,
    statistic: Statistic = "p95",
) -> tuple[TierTable, ...]:
    """Tables simulated for this routing; for a tier that no request reaches, for all of them."""
    tables: list[TierTable] = []
    for tier in range(sample.tiers):
        reached = routed.reached[:, tier]
        requests = np.flatnonzero(reached) if reached.any() else np.arange(sample.requests)
        # An unreached tier may have a threshold that gives everything up at once: its table is of whole answers.
        output_tokens = (routed if reached.any() else sample).output_tokens[:, tier]
        work = source.work(tier)
        of_these = work.seconds(output_tokens)[requests]
        tables.append(
            TierTable(
                tier=tier,
                capacity=capacity(source.curves(tier, requests, output_tokens[requests]), gpus, statistic),
                work=work,
                mean_work_s=float(of_these.mean()),
                tail_work_s=_tail_s(of_these),
                judge_s=judge_s,
            )
        )
    return tuple(tables)


def _tail_s(work_s: NDArray[np.float64]) -> float:
    rank = int(TAIL * (len(work_s) - 1))
    return float(np.partition(work_s, rank)[rank])


def latencies_of(sample: CascadeSample, routed: Routed, tables: Sequence[TierTable]) -> tuple[NDArray[np.float64], ...]:
    """l_i(f) of every tier under this routing."""
    return tuple(table.latencies_s(routed, sample.rate_per_s) for table in tables)
