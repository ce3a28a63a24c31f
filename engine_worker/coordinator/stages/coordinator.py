"""Carries out what a worker's `StageManager` says, and feeds it what happens. Decides nothing itself."""

import asyncio
import logging
from collections.abc import Callable
from math import isinf

import msgspec

from controlplane.model.duties import STAGES
from controlplane.model.instance import InstanceState
from controlplane.policies.stages.agent import BoundaryMoved, ToPeer
from controlplane.policies.stages.manager import (
    Heard,
    MoveEnded,
    MoveRequest,
    PeerLost,
    PeersChanged,
    PlanChanged,
    ReschedulerChanged,
    StageChanged,
    StageEvent,
    StageManager,
    StartedOver,
    Tick,
)
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.record import LAYOUT_PREFIX, BoundaryRecord, StageRecord, boundary_key, layout_key
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Message
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.stages import wire
from engine_worker.coordinator.stages.ended_lengths import EndedLengths
from engine_worker.coordinator.stages.links import StageLinks
from engine_worker.coordinator.stages.metrics import StageMetrics
from engine_worker.coordinator.stages.service import StagesService
from engine_worker.decode_reporting import running_requests
from engine_worker.instance import Instance
from mesh.errors import StaleLeader, StoreError
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
        open_links: Callable[..., StageLinks] = StageLinks,
    ) -> None:
        description = instance.description
        self.manager = StageManager(description.instance_id, description.incarnation_id, limits)
        self.lengths = EndedLengths()
        instance.on_handoff.append(self.lengths.moved_away)
        self._instance = instance
        self._mover = mover
        self._context = context
        self._clock = context.runtime.clock
        self._fence = fence
        self._metrics = StageMetrics(context.registry)
        self._links = open_links(
            description.instance_id,
            description.incarnation_id,
            mover.peers.present,
            self._peer_unheard,
            context.runtime.transport,
        )
        self._plans = FollowedPrefix(context.store, LAYOUT_PREFIX, StageRecord, self._plan_changed)
        self._boundary: BoundaryRecord | None = None
        self._boundary_changed = asyncio.Event()
        self._tasks = TaskSet("stages")
        self._has_left = self._looks_soon = False
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
        """Time has passed; call it every `manager.TICK_MS`."""
        instance = self._instance
        self.lengths.look(instance.table, self._clock.now_s())
        if self.manager.agent is None:
            return  # no plan was ever in force, and nobody has asked anything
        gone = tuple(request_id for request_id in self.manager.offered if not self._runs(request_id))
        self._handle(Tick(self._capacity(), tuple(running_requests(instance.table)), gone))

    def rescheduled(self, is_on: bool) -> None:
        """The mesh's rescheduler has been switched on or off."""
        self._handle(ReschedulerChanged(is_on))

    async def stop(self) -> None:
        """Leave the stages; deals under way end with the migrations of this worker. What is heard from here on starts
        nothing: neither a stream nor a migration, which nobody would end."""
        self._has_left = True
        await self._tasks.cancel()
        await self._links.stop()

    # -- what happens

    def _heard(self, peer: str, message: Message | StageReport) -> None:
        self._handle(Heard(peer, message, self._capacity()))

    def _peer_unheard(self, peer: str) -> None:
        self._metrics.lost_peers.inc()
        self._handle(PeerLost(peer, self._capacity()))

    def _member_changed(self, change: MemberChange) -> None:
        if change.member.role != "worker":
            return
        if change.kind is ChangeKind.LEFT:
            self._handle(PeerLost(change.member.member_id, self._capacity()))
        if not self._looks_soon:
            # The directory tells of a change before it is in force everywhere: look once it is.
            asyncio.get_running_loop().call_soon(self._look_at_peers)
            self._looks_soon = True

    def _look_at_peers(self) -> None:
        self._looks_soon = False
        self._handle(PeersChanged(frozenset(peer.member_id for peer in self._mover.peers.present())))

    def _plan_changed(self, key: str, record: StageRecord | None) -> None:
        if key != layout_key(self._instance.description.model):
            return
        if record is None:
            self._handle(PlanChanged(None))
            return
        try:
            self._fence.check(STAGES, record.epoch, record.leader)
        except StaleLeader as error:
            log.error("a stage plan is refused; the one before stays", extra={"reason": str(error)})
            return
        self._tasks.spawn(self._mover.peers.known(), name="peers")
        self._look_at_peers()
        self._handle(PlanChanged(record.layout, record.quality_model, record.parameters))

    def _runs(self, request_id: str) -> bool:
        tracked = self._instance.table.find(request_id)
        return tracked is not None and tracked.state == "running"

    def _capacity(self) -> Capacity:
        instance = self._instance
        description, load = instance.description, instance.load()
        return Capacity(
            load.running_tokens + load.queued_prefill_tokens,
            (description.kv_blocks - load.kv_blocks_used) * description.block_tokens,
            instance.state is InstanceState.READY and not instance.hung,
            instance.transfer_obstacle,
            instance.frontends,
        )

    # -- what is done about it

    def _handle(self, event: StageEvent) -> None:
        if self._has_left:
            return
        for instruction in self.manager.handle(event, 1000 * self._clock.now_s()):
            match instruction:
                case ToPeer(peer, message):
                    self._links.send(peer, wire.stage_message(message))
                case MoveRequest():
                    self._tasks.spawn(self._move(instruction), name=f"move {instruction.request_id}")
                case BoundaryMoved(tokens):
                    self._boundary_moved(tokens)
                case Closed():
                    self._closed(instruction)
                case StageChanged(stage):
                    log.info("stage", extra={"stage": stage, "revision": self.manager.revision})
                    self._metrics.stage.set(-1 if stage is None else stage)
                case StartedOver(reason):
                    log.error("the bid-ask protocol was broken; its deals are dropped", extra={"reason": reason})

    async def _move(self, order: MoveRequest) -> None:
        moved, reason = False, "the migration failed"
        try:
            outcome = await self._mover.migrate(order.request_id, order.target_instance_id)
            moved, reason = outcome.moved, outcome.reason
        finally:
            self._handle(MoveEnded(order.order_id, moved, reason))

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
        self._boundary = BoundaryRecord(
            description.model,
            description.instance_id,
            0.0 if isinf(tokens) else tokens,
            self.manager.revision,
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
        """As measured of transfers to here; 0 before the first."""
        agent = self.manager.agent
        return 0.0 if agent is None or not agent.receiver.received else agent.receiver.throughput_tokens_s
