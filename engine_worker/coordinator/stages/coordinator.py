"""Carries out what a worker's stage agent says, and feeds it what happens."""

import asyncio
import logging
from collections.abc import Sequence
from math import isinf

import msgspec

from controlplane.model.duties import STAGES
from controlplane.model.instance import InstanceState
from controlplane.policies.stages.agent import (
    AgentInstruction,
    BoundaryMoved,
    OwnLoad,
    StageAgent,
    StageParameters,
    ToPeer,
)
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.record import LAYOUT_PREFIX, BoundaryRecord, StageRecord, boundary_key, layout_key
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Message
from controlplane.protocols.bid_ask.sender import Closed, Migrate
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.stages import wire
from engine_worker.coordinator.stages.ended_lengths import EndedLengths
from engine_worker.coordinator.stages.links import StageLinks
from engine_worker.coordinator.stages.metrics import StageMetrics
from engine_worker.coordinator.stages.service import StagesService
from engine_worker.decode_reporting import running_requests
from engine_worker.instance import Instance
from mesh.errors import IllegalTransition, StaleLeader, StoreError
from mesh.leadership_state import Fence
from mesh.membership import ChangeKind, MemberChange
from mesh.role import RoleContext
from mesh.store.followed_prefix import FollowedPrefix
from mesh.tasks import TaskSet
from penstock.v1 import stages_pb2_grpc

log = logging.getLogger(__name__)


class StageCoordinator:
    """One per worker whose engine lets requests move. Without a plan for its model it does nothing but answer."""

    def __init__(
        self,
        instance: Instance,
        mover: Coordinator,
        context: RoleContext,
        fence: Fence,
        limits: BidAskLimits | None = None,
    ) -> None:
        description = instance.description
        self.agent: StageAgent | None = None
        """Made for the plan's parameters; None before the first plan."""
        self.lengths = EndedLengths()
        instance.on_hand_away.append(self.lengths.moved_away)
        self._instance = instance
        self._mover = mover
        self._context = context
        self._clock = context.runtime.clock
        self._fence = fence
        self._limits = limits or BidAskLimits()
        self._metrics = StageMetrics(context.registry)
        self._record: StageRecord | None = None
        self._links = StageLinks(
            description.instance_id,
            description.incarnation_id,
            mover.peers,
            lambda peer: self._peer_lost(peer),
            context.runtime.transport,
        )
        self._plans = FollowedPrefix(context.store, LAYOUT_PREFIX, StageRecord, self._plan_changed)
        self._boundary: BoundaryRecord | None = None
        self._boundary_changed = asyncio.Event()
        self._tasks = TaskSet("stages")
        context.server.add(
            stages_pb2_grpc.add_StagesServicer_to_server,
            StagesService(description.incarnation_id, self._heard, self.lengths, self._transfer_tokens_s),
            "penstock.v1.Stages",
        )

    def start(self) -> None:
        """Follow plans and members."""
        self._tasks.spawn(self._plans.follow(), name="plans")
        self._tasks.spawn(self._write_boundaries(), name="boundary")
        self._context.directory.subscribe(self._member_changed)

    def tick(self) -> None:
        """Time has passed; call it every 50 ms or so."""
        self.lengths.look(self._instance.table, self._clock.now_s())
        if self.agent is not None:
            try:
                self._tick_agent(self.agent)
            except IllegalTransition:
                self._start_over()

    async def stop(self) -> None:
        """Leave the stages; deals under way end with the migrations of this worker."""
        await self._tasks.cancel()
        await self._links.stop()

    # -- what happens

    @property
    def _now_ms(self) -> float:
        return 1000 * self._clock.now_s()

    def _tick_agent(self, agent: StageAgent) -> None:
        self._observe(agent)
        for request_id in agent.offered:
            tracked = self._instance.table.find(request_id)
            if tracked is None or tracked.state != "running":
                self._carry_out(agent.request_ended(request_id, self._now_ms))
        self._carry_out(agent.tick(self._now_ms))

    def _start_over(self) -> None:
        """A bug must not end the worker's part in the stages: a fresh agent, as after a restart."""
        log.exception("the bid-ask protocol was broken; its deals are dropped")
        self.agent = None
        self._use_layout()

    def _heard(self, peer: str, message: Message | StageReport) -> None:
        agent = self._made_agent()
        self._observe(agent, capacity_only=True)
        try:
            self._carry_out(agent.receive(peer, message, self._now_ms))
        except IllegalTransition:
            self._start_over()

    def _peer_lost(self, peer: str) -> None:
        self._metrics.lost_peers.inc()
        if self.agent is not None:
            self._observe(self.agent, capacity_only=True)
            self._carry_out(self.agent.peer_lost(peer, self._now_ms))

    def _member_changed(self, change: MemberChange) -> None:
        if change.member.role != "worker":
            return
        if change.kind is ChangeKind.LEFT and self.agent is not None:
            self._carry_out(self.agent.peer_lost(change.member.member_id, self._now_ms))
        # The directory tells of a change before it is in force everywhere: look once it is.
        asyncio.get_running_loop().call_soon(self._use_layout)

    def _plan_changed(self, key: str, record: StageRecord | None) -> None:
        if key != layout_key(self._instance.description.model):
            return
        if record is not None:
            try:
                self._fence.check(STAGES, record.epoch, record.leader)
            except StaleLeader as error:
                log.error("a stage plan is refused; the one before stays", extra={"reason": str(error)})
                return
        if record is not None and (self._record is None or record.parameters != self._record.parameters):
            # Parameters are an agent's for life; deals of the one before end as if this worker had restarted.
            self.agent = None
        self._record = record
        self._use_layout()

    def _use_layout(self) -> None:
        """The plan without the instances that are not there."""
        record = self._record
        if record is None and self.agent is None:
            return
        agent = self._made_agent()
        alive = {self._instance.description.instance_id, *(peer.member_id for peer in self._mover.peers())}
        layout = None if record is None else record.layout.covering(alive)
        before = agent.stage
        model = None if record is None else record.quality_model
        self._carry_out(agent.use_layout(layout, model, self._now_ms))
        if agent.stage != before:
            log.info("stage", extra={"stage": agent.stage, "revision": 0 if layout is None else layout.revision})
        self._metrics.stage.set(-1 if agent.stage is None else agent.stage)

    # -- what is done about it

    def _made_agent(self) -> StageAgent:
        if self.agent is None:
            description = self._instance.description
            parameters = StageParameters() if self._record is None else self._record.parameters
            # A fresh name, so that no deal of an agent before is mistaken for one of this.
            name = f"{description.incarnation_id}-{int(self._now_ms)}"
            self.agent = StageAgent(description.instance_id, name, parameters, self._limits)
        return self.agent

    def _observe(self, agent: StageAgent, *, capacity_only: bool = False) -> None:
        """What is heard from others needs the capacity alone; the requests are as of the last tick then."""
        instance = self._instance
        description, load = instance.description, instance.load()
        running = agent.own.running if capacity_only else tuple(running_requests(instance.table))
        agent.observe(
            OwnLoad(
                running,
                load.running_tokens + load.queued_prefill_tokens,
                (description.kv_blocks - load.kv_blocks_used) * description.block_tokens,
                instance.state is InstanceState.READY and not instance.hung,
            )
        )

    def _carry_out(self, instructions: Sequence[AgentInstruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ToPeer(peer, message):
                    self._links.send(peer, wire.stage_message(message))
                case Migrate(request_id, target):
                    self._tasks.spawn(self._migrate(request_id, target), name=f"move {request_id}")
                case BoundaryMoved(tokens):
                    self._boundary_moved(tokens)
                case Closed():
                    self._closed(instruction)

    async def _migrate(self, request_id: str, target: str) -> None:
        agent = self._made_agent()
        moved, reason = False, "the migration failed"
        try:
            outcome = await self._mover.migrate(request_id, target)
            moved, reason = outcome.moved, outcome.reason
        finally:
            if agent is self.agent:
                self._observe(agent)
            self._carry_out(agent.migration_ended(request_id, moved, reason, self._now_ms))

    def _closed(self, closed: Closed) -> None:
        self._metrics.deals.labels("moved" if closed.moved else "kept").inc()
        log.debug(
            "a deal ended",
            extra={
                "request_id": closed.request_id,
                "instance_id": closed.instance_id,
                "moved": closed.moved,
                "reason": closed.reason,
            },
        )

    def _boundary_moved(self, tokens: float) -> None:
        self._metrics.boundary_tokens.set(tokens)
        description = self._instance.description
        revision = 0 if self._record is None else self._record.layout.revision
        self._boundary = BoundaryRecord(
            description.model,
            description.instance_id,
            0.0 if isinf(tokens) else tokens,
            revision,
            int(1000 * self._clock.unix_s()),
        )
        self._boundary_changed.set()

    async def _write_boundaries(self) -> None:
        """Each move, as soon as the store takes it; of moves that come faster only the last."""
        while True:
            await self._boundary_changed.wait()
            self._boundary_changed.clear()
            record = self._boundary
            assert record is not None, "set before the event"
            try:
                await self._context.store.put(boundary_key(record.instance_id), msgspec.json.encode(record))
            except StoreError as error:
                log.warning("the state store does not take a boundary; trying again", extra={"error": str(error)})
                self._boundary_changed.set()
                await asyncio.sleep(1.0)

    def _transfer_tokens_s(self) -> float:
        return (
            0.0 if self.agent is None or not self.agent.receiver.received else self.agent.receiver.throughput_tokens_s
        )
