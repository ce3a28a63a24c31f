"""A Llumnix-like rival: dispatch by freeness, and load migration from instances short of memory to the freest.

Llumnix (OSDI 2024, sections 4.4.2 and 4.4.3), without priorities, de-fragmentation towards the head of a queue and
auto-scaling. Freeness is the number of steps that an instance's requests can go on before its memory is full: (memory -
what running and waiting requests need) / requests.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import total_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import among_candidates, lowest
from simulator.cluster.control import Cluster, ClusterEvent

LEAST_STEPS = 3.0
"""An instance below this freeness gives requests away, one above takes them (its default threshold)."""


class FreenessDispatch:
    """The `Policy` of Llumnix: the instance with the highest freeness."""

    name: ClassVar[str] = "llumnix"
    rule: ClassVar[str] = "score = -(KV tokens - tokens of running and waiting requests) / requests"

    def __init__(self) -> None:
        self.parameters = PolicyParameters()
        self._turn = 0

    def decide(self, problem: PlacementProblem) -> Decision:
        snapshot = problem.snapshot
        capacity = snapshot.kv_blocks_total * snapshot.block_tokens
        freeness = (capacity - total_tokens(problem)) / np.maximum(snapshot.batch_requests, 1)
        scores = among_candidates(-freeness, problem.candidates)
        self._turn += 1
        return Decision(lowest(scores, self._turn), scores)


class LoadMigration:
    """A `Controller`: pairs the least free instance with the freest one, and so on, one short request for each pair."""

    interval_ms: float | None = 1000.0

    def __init__(self) -> None:
        self.ordered = 0

    def attached(self, cluster: Cluster) -> None:
        """Part of `Controller`; needs nothing of the simulation in advance."""

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """Part of `Controller`; acts by the clock, not by events."""

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        steps = {instance_id: _freeness(cluster, instance_id) for instance_id in cluster.instance_ids()}
        ordered = sorted(steps, key=lambda instance_id: steps[instance_id])
        orders = []
        for source, target in zip(ordered, reversed(ordered), strict=True):
            if steps[source] >= LEAST_STEPS or steps[target] <= LEAST_STEPS or source == target:
                break
            running = [each for each in cluster.running(source) if not cluster.moves(each.request_id)]
            if running:
                shortest = min(running, key=lambda request: (request.context_tokens, request.request_id))
                reason = f"{steps[source]:.1f} steps until its memory is full, {steps[target]:.1f} there"
                orders.append(MigrationOrder(shortest.request_id, source, target, reason))
        self.ordered += len(orders)
        return orders


def _freeness(cluster: Cluster, instance_id: str) -> float:
    load, description = cluster.load(instance_id), cluster.description(instance_id)
    capacity = description.kv_blocks * description.block_tokens
    needed = load.kv_blocks_used * description.block_tokens + load.queued_prefill_tokens
    return (capacity - needed) / max(load.running_requests + load.queued_requests, 1)
