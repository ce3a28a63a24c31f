"""Length-specialised stages in a simulation: the live agents, one per instance, over simulated messages."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import isinf

from controlplane.model.migration_order import MigrationOrder
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import (
    AgentInstruction,
    BoundaryMoved,
    OwnLoad,
    StageAgent,
    StageParameters,
    ToPeer,
)
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.placement import Stages
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Message
from controlplane.protocols.bid_ask.sender import Closed, Migrate
from simulator.cluster.control import Cluster, ClusterEvent, Ended, Joined, Lost
from simulator.cluster.migration.office import MigrationEnd


class StageController:
    """A `Controller`. `policy` is the one that places the simulation's requests; it is kept at the refined layout."""

    def __init__(
        self,
        layout: StageLayout,
        model: QoeModel,
        policy: Stages,
        parameters: StageParameters | None = None,
        limits: BidAskLimits | None = None,
        *,
        tick_ms: float = 250.0,
    ) -> None:
        self.interval_ms: float | None = tick_ms
        self.layout = layout
        self.moved = 0
        """Requests that changed their instance."""
        self.kept: Counter[str] = Counter()
        """Offers that came to nothing, by reason."""
        self.boundaries: list[tuple[float, str, float]] = []
        """Every move of a boundary: time in s, instance, tokens."""
        self._model = model
        self._policy = policy
        self._parameters = parameters or StageParameters()
        self._limits = limits or BidAskLimits()
        self._agents: dict[str, StageAgent] = {}
        self._lives: Counter[str] = Counter()
        self._refined: dict[str, float] = {}
        self._cluster: Cluster | None = None

    def attached(self, cluster: Cluster) -> None:
        """See `Controller`."""
        self._cluster = cluster
        for instance_id in cluster.instance_ids():
            self._join(instance_id)
        self._use_layout(cluster)

    def act(self, cluster: Cluster, now_ms: float) -> Sequence[MigrationOrder]:
        """See `Controller`."""
        for instance_id in cluster.instance_ids():
            agent = self._agents[instance_id]
            agent.observe(self._own_load(cluster, instance_id, with_running=True))
            self._carry_out(cluster, instance_id, agent.tick(now_ms))
        return ()

    def on_event(self, event: ClusterEvent, now_ms: float) -> None:
        """See `Controller`."""
        cluster = self._cluster
        if cluster is None:
            return
        match event:
            case Ended(request_id, instance_id):
                agent = self._agents.get(instance_id)
                if agent is not None and agent.sender.state_of(request_id) is not None:
                    self._carry_out(cluster, instance_id, agent.request_ended(request_id, now_ms))
            case MigrationEnd(order, moved, reason):
                agent = self._agents.get(order.source_instance_id)
                if agent is not None:
                    ended = agent.migration_ended(order.request_id, moved, reason, now_ms)
                    self._carry_out(cluster, order.source_instance_id, ended)
            case Joined(instance_id):
                self._join(instance_id)
                self._use_layout(cluster)
            case Lost(instance_id):
                self._lose(cluster, instance_id, now_ms)

    def _join(self, instance_id: str) -> None:
        self._lives[instance_id] += 1
        name = f"{instance_id}.{self._lives[instance_id]}"
        self._agents[instance_id] = StageAgent(instance_id, name, self._parameters, self._limits)

    def _lose(self, cluster: Cluster, lost: str, now_ms: float) -> None:
        del self._agents[lost]
        self._refined.pop(lost, None)
        for instance_id, agent in self._agents.items():
            self._carry_out(cluster, instance_id, agent.peer_lost(lost, now_ms))
        self._use_layout(cluster)

    def _use_layout(self, cluster: Cluster) -> None:
        layout = self.layout.covering(self._agents)
        for instance_id, agent in self._agents.items():
            self._carry_out(cluster, instance_id, agent.use_layout(layout, self._model, cluster.now_ms))
        self._place_by_refined(cluster)

    def _place_by_refined(self, cluster: Cluster) -> None:
        self._policy.use_layout(cluster.model, self.layout.refined(self._refined))

    def _carry_out(self, cluster: Cluster, instance_id: str, instructions: Sequence[AgentInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ToPeer(peer, message):
                    self._send(cluster, instance_id, peer, message)
                case Migrate(request_id, target):
                    cluster.order(MigrationOrder(request_id, instance_id, target, "bid-ask"))
                case BoundaryMoved(tokens):
                    self._boundary_moved(cluster, instance_id, tokens)
                case Closed():
                    self.moved += instruction.moved
                    if not instruction.moved:
                        self.kept[instruction.reason.partition(":")[0]] += 1

    def _send(self, cluster: Cluster, speaker: str, listener: str, message: Message | StageReport) -> None:
        life = self._lives[listener]

        def arrive(now_ms: float) -> None:
            agent = self._agents.get(listener)
            if agent is None or self._lives[listener] != life:
                return
            if not isinstance(message, StageReport):
                own = self._own_load(cluster, listener, with_running=False)
                agent.observe(replace(own, running=agent.own.running))
            self._carry_out(cluster, listener, agent.receive(speaker, message, now_ms))

        cluster.after(cluster.message_delay_ms, arrive)

    def _boundary_moved(self, cluster: Cluster, instance_id: str, tokens: float) -> None:
        self.boundaries.append((cluster.now_ms / 1000, instance_id, tokens))
        if isinf(tokens):
            self._refined.pop(instance_id, None)
        else:
            self._refined[instance_id] = tokens
        self._place_by_refined(cluster)

    def _own_load(self, cluster: Cluster, instance_id: str, *, with_running: bool) -> OwnLoad:
        load, description = cluster.load(instance_id), cluster.description(instance_id)
        running = tuple(cluster.running(instance_id)) if with_running else ()
        idle_tokens = (description.kv_blocks - load.kv_blocks_used) * description.block_tokens
        return OwnLoad(running, load.running_tokens + load.queued_prefill_tokens, idle_tokens)
