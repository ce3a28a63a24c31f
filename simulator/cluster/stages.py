"""Length-specialised stages in a simulation: the live stage managers, one per instance, over simulated messages."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import isinf

from controlplane.model.migration_order import MigrationOrder
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import BoundaryMoved, StageParameters, ToPeer
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.manager import (
    TICK_MS,
    Heard,
    MoveEnded,
    MoveRequest,
    PeerLost,
    PeersChanged,
    PlanChanged,
    StageEvent,
    StageManager,
    StartedOver,
    Tick,
)
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.placement import Stages
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Message
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed
from mesh.errors import IllegalTransition
from simulator.cluster.control import Cluster, ClusterEvent, Ended, Joined, Lost, MigrationEnd


class StageController:
    """A `Controller`. `policy` is the one that places the simulation's requests; it is kept at the refined layout.

    What a worker's shell does over gRPC is done here with simulated messages, at the same intervals.
    """

    def __init__(
        self,
        layout: StageLayout,
        model: QoeModel,
        policy: Stages,
        parameters: StageParameters | None = None,
        limits: BidAskLimits | None = None,
    ) -> None:
        self.interval_ms: float | None = TICK_MS
        self.layout = layout
        self.moved = 0
        """Requests that changed their instance."""
        self.kept: Counter[str] = Counter()
        """Offers that came to nothing, by reason."""
        self.boundaries: list[tuple[float, str, float]] = []
        """Every move of a boundary: time in s, instance, tokens."""
        self.managers: dict[str, StageManager] = {}
        """Of the instances that are alive."""
        self._plan = PlanChanged(layout, model, parameters or StageParameters())
        self._policy = policy
        self._limits = limits
        self._lives: Counter[str] = Counter()
        self._refined: dict[str, float] = {}
        self._ended: defaultdict[str, list[str]] = defaultdict(list)
        """Requests that have ended on each instance since its last tick."""
        self._orders: dict[MigrationOrder, tuple[StageManager, str]] = {}
        """Migrations under way: who asked for them, and their ids there."""
        self._cluster: Cluster | None = None

    def attached(self, cluster: Cluster) -> None:
        self._cluster = cluster
        for instance_id in cluster.instance_ids():
            self._join(instance_id)
        self._look_at_members(cluster)

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        for instance_id in cluster.instance_ids():
            ended, offered = self._ended.pop(instance_id, ()), self.managers[instance_id].offered
            gone = tuple(request_id for request_id in ended if request_id in offered)
            running = tuple(cluster.running(instance_id))
            self._handle(cluster, instance_id, Tick(_capacity(cluster, instance_id), running, gone))
        return ()

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        cluster = self._cluster
        if cluster is None:
            return
        match event:
            case Ended(request_id, instance_id):
                self._ended[instance_id].append(request_id)
            case MigrationEnd(order, moved, reason) if order in self._orders:
                manager, order_id = self._orders.pop(order)
                if manager is self.managers.get(order.source_instance_id):
                    self._handle(cluster, order.source_instance_id, MoveEnded(order_id, moved, reason))
            case Joined(instance_id):
                self._join(instance_id)
                self._look_at_members(cluster)
            case Lost(instance_id):
                self._lose(cluster, instance_id)

    def _join(self, instance_id: str) -> None:
        self._lives[instance_id] += 1
        name = f"{instance_id}.{self._lives[instance_id]}"
        self.managers[instance_id] = StageManager(instance_id, name, self._limits)

    def _lose(self, cluster: Cluster, lost: str) -> None:
        del self.managers[lost]
        self._refined.pop(lost, None)
        self._ended.pop(lost, None)
        for instance_id in tuple(self.managers):
            self._handle(cluster, instance_id, PeerLost(lost, _capacity(cluster, instance_id)))
        self._look_at_members(cluster)

    def _look_at_members(self, cluster: Cluster) -> None:
        alive = frozenset(self.managers)
        for instance_id in tuple(self.managers):
            self._handle(cluster, instance_id, PeersChanged(alive - {instance_id}))
            if not self.managers[instance_id].revision:
                self._handle(cluster, instance_id, self._plan)
        self._place_by_refined(cluster)

    def _place_by_refined(self, cluster: Cluster) -> None:
        self._policy.use_layout(cluster.model, self.layout.refined(self._refined))

    def _handle(self, cluster: Cluster, instance_id: str, event: StageEvent) -> None:
        for instruction in self.managers[instance_id].handle(event, cluster.now_ms):
            match instruction:
                case ToPeer(peer, message):
                    self._send(cluster, instance_id, peer, message)
                case MoveRequest(order_id, request_id, target):
                    order = MigrationOrder(request_id, instance_id, target, f"bid-ask {order_id}")
                    self._orders[order] = (self.managers[instance_id], order_id)
                    cluster.order(order)
                case BoundaryMoved(tokens):
                    self._boundary_moved(cluster, instance_id, tokens)
                case Closed():
                    self.moved += instruction.moved
                    if not instruction.moved:
                        # Some reasons name the request: it had ended, and nobody had noticed yet.
                        names_it = instruction.reason.startswith(f"request {instruction.request_id} ")
                        self.kept["the request ended" if names_it else instruction.reason.partition(":")[0]] += 1
                case StartedOver(reason):
                    raise IllegalTransition(reason)

    def _send(self, cluster: Cluster, speaker: str, listener: str, message: Message | StageReport) -> None:
        there = self.managers.get(listener)

        def arrive(now_ms: float) -> None:
            if there is not None and there is self.managers.get(listener):
                self._handle(cluster, listener, Heard(speaker, message, _capacity(cluster, listener)))

        cluster.after(cluster.message_delay_ms, arrive)

    def _boundary_moved(self, cluster: Cluster, instance_id: str, tokens: float) -> None:
        self.boundaries.append((cluster.now_ms / 1000, instance_id, tokens))
        if isinf(tokens):
            self._refined.pop(instance_id, None)
        else:
            self._refined[instance_id] = tokens
        self._place_by_refined(cluster)


def _capacity(cluster: Cluster, instance_id: str) -> Capacity:
    load, description = cluster.load(instance_id), cluster.description(instance_id)
    idle_tokens = (description.kv_blocks - load.kv_blocks_used) * description.block_tokens
    return Capacity(load.running_tokens + load.queued_prefill_tokens, idle_tokens)
