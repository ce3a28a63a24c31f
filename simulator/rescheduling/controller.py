"""The rescheduler as a controller of a simulation."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import UNKNOWN, load_of
from controlplane.policies.rescheduling.migrations import Migrations, OrderedMigration
from controlplane.policies.rescheduling.mode import ReschedulerMode
from controlplane.policies.rescheduling.parameters import ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.rescheduler import Rescheduler
from simulator.cluster.control import Cluster, ClusterEvent
from simulator.cluster.migration.office import MigrationEnd
from simulator.rescheduling.remaining_lengths import RemainingLengths, Tokens


class ReschedulingController:
    """Decides every interval by the same `Rescheduler` as the live scheduler, with the same account of its orders.

    Instances are seen as they are at that moment; live reports are up to an interval old.
    """

    def __init__(
        self,
        mode: ReschedulerMode,
        parameters: ReschedulerParameters,
        lengths: RemainingLengths | None = None,
        max_in_flight: int = 8,
    ) -> None:
        """`lengths` predicts, where the mode asks for predictions."""
        self.ordered_s: list[float] = []
        """When orders were given."""
        self.moves_ms: list[float] = []
        """From an order to its end, of the requests that moved."""
        self.migrations = Migrations(max_in_flight, max_remembered=0)
        self._rescheduler = Rescheduler(mode, parameters)
        self._lengths = lengths
        self._under_way: dict[str, OrderedMigration] = {}

    @property
    def interval_ms(self) -> float | None:
        """See `Controller`."""
        return 1000 * self._rescheduler.parameters.interval_s

    def attached(self, cluster: Cluster) -> None:
        """See `Controller`."""

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        """One interval."""
        now_s = now_ms / 1000
        self.migrations.settle(lambda _: now_s, now_s)
        instances = self._instances(cluster, self.migrations.shunned_targets(now_s))
        held = self.migrations.held_requests(now_s).union(self._moved_by_others(cluster, instances))
        decided = self._rescheduler.decide(instances, self.migrations.moving(), held)
        orders = decided.orders[: max(0, self.migrations.room)]
        for order in orders:
            self._under_way[order.request_id] = self.migrations.begin(order, now_s, 0)
            self.ordered_s.append(now_s)
        return orders

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """An order may have ended."""
        if isinstance(event, MigrationEnd):
            ordered = self._under_way.get(event.order.request_id)
            if ordered is not None and ordered.order == event.order:
                del self._under_way[event.order.request_id]
                if event.moved:
                    self.moves_ms.append(event.ended_ms - event.ordered_ms)
                self.migrations.end(
                    ordered, moved=event.moved, message=event.reason, paused_ms=event.paused_ms, now_s=now_ms / 1000
                )

    def _moved_by_others(self, cluster: Cluster, instances: Sequence[DecodeInstance]) -> list[str]:
        return [
            request_id
            for instance in instances
            for request_id in instance.load.request_ids
            if request_id not in self._under_way and cluster.moves(request_id)
        ]

    def _instances(self, cluster: Cluster, shunned: frozenset[str]) -> list[DecodeInstance]:
        ids = [each for each in cluster.instance_ids() if cluster.description(each).phase.decodes]
        running = [cluster.running(instance_id) for instance_id in ids]
        context = np.array([request.context_tokens for each in running for request in each], dtype=np.int64)
        remaining = self._predict(cluster, [request for each in running for request in each])
        ends = np.cumsum([len(each) for each in running]).tolist()
        horizon = self._rescheduler.parameters.horizon
        instances = []
        for instance_id, requests, end in zip(ids, running, ends, strict=True):
            rows = slice(end - len(requests), end)
            names = tuple(request.request_id for request in requests)
            description, load = cluster.description(instance_id), cluster.load(instance_id)
            instances.append(
                DecodeInstance(
                    instance_id,
                    description.kv_blocks * description.block_tokens,
                    load.token_interval_ms or load.step_ms,
                    instance_id not in shunned,
                    load_of(names, context[rows], remaining[rows], horizon),
                )
            )
        return instances

    def _predict(self, cluster: Cluster, running: Sequence[RunningRequest]) -> Tokens:
        if self._lengths is None or not running:
            return np.full(len(running), UNKNOWN, dtype=np.int64)
        keys = np.array([crc32(request.request_id.encode()) for request in running], dtype=np.uint64)
        generated = np.array([request.generated_tokens for request in running], dtype=np.int64)
        left = [cluster.oracle_remaining_tokens(request.request_id) for request in running]
        return self._lengths.predict(keys, generated, generated + np.array(left, dtype=np.int64))
