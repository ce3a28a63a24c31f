"""The rescheduler as a controller of a simulation."""

from collections.abc import Callable, Sequence
from zlib import crc32

import numpy as np

from controlplane.model.migration_order import MigrationOrder
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.decode_load import UNKNOWN, load_of
from controlplane.policies.rescheduling.manager import (
    Configured,
    Decide,
    Decided,
    GiveOrder,
    IntervalPassed,
    OrderEnded,
    ReschedulingManager,
)
from controlplane.policies.rescheduling.migrations import OrderedMigration
from controlplane.policies.rescheduling.parameters import ReschedulerMode, ReschedulerParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.view import InstanceReport, ModelReport, decode_view
from simulator.cluster.control import Cluster, ClusterEvent, MigrationEnd
from simulator.rescheduling.remaining_lengths import RemainingLengths, Tokens


class ReschedulingController:
    """A `Controller` that carries out what the live `ReschedulingManager` says.

    Instances are seen as they are at that moment; live reports are up to an interval old.
    """

    def __init__(
        self,
        mode: ReschedulerMode,
        parameters: ReschedulerParameters,
        lengths: RemainingLengths | None = None,
        max_in_flight: int = 8,
        stage_of: Callable[[str], int | None] = lambda instance_id: None,
    ) -> None:
        """`lengths` predicts, where the mode asks for predictions; `stage_of` says which stage an instance is in."""
        self.ordered_s: list[float] = []
        """When orders were given."""
        self.moves_ms: list[float] = []
        """From an order to its end, of the requests that moved."""
        self.manager = ReschedulingManager(mode, max_in_flight, max_remembered=0)
        self.manager.handle(Configured(mode, parameters), 0.0)
        self._lengths = lengths
        self._stage_of = stage_of
        self._cluster: Cluster | None = None
        self._under_way: dict[MigrationOrder, OrderedMigration] = {}

    @property
    def interval_ms(self) -> float | None:
        return 1000 * self.manager.switch.parameters.interval_s

    def attached(self, cluster: Cluster) -> None:
        """See `Controller`."""
        self._cluster = cluster

    def running(self) -> tuple[DecodeInstance, ...]:
        """The instances that decode, at this very moment."""
        assert self._cluster is not None, "it is attached"
        now_s, parameters = self._cluster.now_ms / 1000, self.manager.switch.parameters
        reports = self._reports(self._cluster, now_s)
        return decode_view(self._cluster.model, reports, parameters, frozenset(), now_s).instances

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        """One interval."""
        now_s = now_ms / 1000
        report = ModelReport(self._reports(cluster, now_s))
        alive = frozenset(cluster.instance_ids())
        orders: list[MigrationOrder] = []
        for instruction in self.manager.handle(IntervalPassed({cluster.model: report}), now_s):
            if not isinstance(instruction, Decide):
                continue
            decided = Decided(instruction.decision_id, instruction.decide(), alive)
            for given in self.manager.handle(decided, now_s):
                if isinstance(given, GiveOrder):
                    self._under_way[given.ordered.order] = given.ordered
                    self.ordered_s.append(now_s)
                    orders.append(given.ordered.order)
        return orders

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """An order may have ended."""
        if isinstance(event, MigrationEnd) and event.order in self._under_way:
            ordered = self._under_way.pop(event.order)
            if event.moved:
                self.moves_ms.append(event.ended_ms - event.ordered_ms)
            self.manager.handle(OrderEnded(ordered, event.moved, event.reason, event.paused_ms), now_ms / 1000)

    def _reports(self, cluster: Cluster, now_s: float) -> tuple[InstanceReport, ...]:
        ids = [each for each in cluster.instance_ids() if cluster.description(each).phase.decodes]
        running = [cluster.running(instance_id) for instance_id in ids]
        context = np.array([request.context_tokens for each in running for request in each], dtype=np.int64)
        remaining, band = self._predict(cluster, [request for each in running for request in each])
        ends = np.cumsum([len(each) for each in running]).tolist()
        horizon = self.manager.switch.parameters.horizon
        reports = []
        for instance_id, requests, end in zip(ids, running, ends, strict=True):
            rows = slice(end - len(requests), end)
            names = tuple(request.request_id for request in requests)
            description, load = cluster.description(instance_id), cluster.load(instance_id)
            reports.append(
                InstanceReport(
                    instance_id,
                    description.kv_blocks * description.block_tokens,
                    load.token_interval_ms or load.step_ms,
                    load_of(names, context[rows], remaining[rows], horizon, (), band[:, rows]),
                    now_s,
                    costs=cluster.spec(instance_id).profiled,
                    stage=self._stage_of(instance_id),
                )
            )
        return tuple(reports)

    def _predict(self, cluster: Cluster, running: Sequence[RunningRequest]) -> tuple[Tokens, Tokens]:
        """What remains, and its band."""
        if self._lengths is None or not running:
            unknown = np.full(len(running), UNKNOWN, dtype=np.int64)
            return unknown, np.stack([unknown, unknown])
        keys = np.array([crc32(request.request_id.encode()) for request in running], dtype=np.uint64)
        generated = np.array([request.generated_tokens for request in running], dtype=np.int64)
        left = [cluster.oracle_remaining_tokens(request.request_id) for request in running]
        predicted = self._lengths.predict(keys, generated, generated + np.array(left, dtype=np.int64))
        return predicted, self._lengths.band(generated, predicted)
