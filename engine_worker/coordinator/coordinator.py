"""Migrations from and to one worker."""

import asyncio
import logging
from itertools import count
from typing import TypeAlias

from controlplane.protocols.migration.source import Cancel, TargetLost
from engine_worker.coordinator import wire
from engine_worker.coordinator.arrivals import Arrivals
from engine_worker.coordinator.lanes import Lanes
from engine_worker.coordinator.link import TargetLink, source_hello
from engine_worker.coordinator.outgoing import MigrationOutcome, OutgoingMigration
from engine_worker.coordinator.workplace import Workplace
from engine_worker.request_table import TrackedRequest
from mesh.errors import PenstockError
from mesh.membership import Directory, Member
from mesh.runtime import Transport
from penstock.v1 import migration_pb2

log = logging.getLogger(__name__)

ALIKE = ("model", "engine", "block_tokens")
"""Attributes that two workers must share before KV of one makes sense to the other."""
LinkKey: TypeAlias = tuple[str, str, str, str, str]
"""Instance, incarnation and address of the target, and the addresses that it was told of this worker and of its KV
transfer agent."""
ENDED = MigrationOutcome(False, "the request ended before it was moved", "ended")


class Coordinator:
    """Starts migrations to other workers, at most so many at once, and takes those from others (`arrivals`)."""

    def __init__(self, workplace: Workplace, directory: Directory, transport: Transport) -> None:
        self.arrivals = Arrivals(workplace)
        self._workplace = workplace
        self._directory = directory
        self._transport = transport
        self._outgoing: dict[str, OutgoingMigration] = {}
        """By migration id."""
        self._ordered: set[str] = set()
        """Requests that a migration was ordered for."""
        self._departed_s: dict[str, float] = {}
        """When a migration of a request ended, for as long as the tombstones of arrivals."""
        self._lanes = Lanes(workplace.settings.parallel, self._runs)
        self._links: dict[LinkKey, TargetLink] = {}
        self._numbers = count(1)
        self._is_stopping = False
        workplace.instance.on_change.append(self._look)
        workplace.instance.keep_abort = self._keep_abort
        workplace.instance.was_moving = self._was_moving

    @property
    def outgoing(self) -> int:
        """Migrations away from here that are ordered or under way."""
        return len(self._ordered | {outgoing.request_id for outgoing in self._outgoing.values()})

    def peers(self) -> tuple[Member, ...]:
        """Workers that KV of this one makes sense to."""
        own = self._workplace.instance.description
        facts = {"model": own.model, "engine": own.engine, "block_tokens": str(own.block_tokens)}
        return tuple(
            member
            for member in self._directory.members("worker")
            if member.member_id != own.instance_id and all(member.attributes.get(name) == facts[name] for name in ALIKE)
        )

    async def migrate(self, request_id: str, target_id: str, *, stop_and_copy: bool = False) -> MigrationOutcome:
        """Move a running request; returns when that is done or why it stayed. Where the caller gives up, so does the
        migration."""
        obstacle = self._obstacle(request_id, target_id)
        if obstacle:
            return MigrationOutcome(False, obstacle)
        settings = self._workplace.settings
        if len(self._ordered) >= settings.queued + settings.parallel:
            return MigrationOutcome(False, f"{len(self._ordered)} migrations are ordered already; try again later")
        tracked = self._workplace.instance.table.find(request_id)
        assert tracked is not None, "a request that is not here is an obstacle"
        return await self._move(tracked, target_id, stop_and_copy)

    async def hand_over(self, tracked: TrackedRequest, target_id: str) -> MigrationOutcome:
        """Move a request once its prompt is computed; its blocks go ahead. As many of these orders as there are
        requests may wait."""
        if not self._runs(tracked):
            return ENDED
        obstacle = self._obstacle(tracked.request.request_id, target_id)
        if obstacle:
            return MigrationOutcome(False, obstacle)
        return await self._move(tracked, target_id)

    def is_ordered(self, request_id: str) -> bool:
        """Whether the request is to be moved already."""
        return request_id in self._ordered

    def tick(self) -> None:
        """Time has passed; call it every 50 ms or so."""
        for outgoing in list(self._outgoing.values()):
            outgoing.tick()
        self.arrivals.tick()
        oldest_s = self._workplace.clock() - self._workplace.settings.tombstone_s
        for request_id in [each for each, ended_s in self._departed_s.items() if ended_s < oldest_s]:
            del self._departed_s[request_id]

    async def stop(self) -> None:
        """Take no more orders; what is under way is cancelled, what is paused gets a moment to be settled."""
        self._is_stopping = True
        for outgoing in list(self._outgoing.values()):
            outgoing.handle(Cancel("the worker is stopping"))
        outcomes = [outgoing.outcome for outgoing in self._outgoing.values()]
        if outcomes:
            await asyncio.wait(outcomes, timeout=self._workplace.settings.limits.verdict_ms / 1000)
        await self._workplace.tasks.cancel()

    async def _move(self, tracked: TrackedRequest, target_id: str, stop_and_copy: bool = False) -> MigrationOutcome:
        """When its turn has come; there is no obstacle."""
        request_id = tracked.request.request_id
        self._ordered.add(request_id)
        try:
            async with self._lanes.enter(tracked) as is_here:
                if not is_here:
                    return ENDED
                return await self._migrate(tracked, target_id, stop_and_copy)
        finally:
            self._ordered.discard(request_id)

    async def _migrate(self, tracked: TrackedRequest, target_id: str, stop_and_copy: bool) -> MigrationOutcome:
        workplace, settings = self._workplace, self._workplace.settings
        target = self._peer(target_id)
        if target is None or self._is_stopping:
            return MigrationOutcome(False, "its target left, or this worker stops, before the migration had its turn")
        limits = settings.stop_and_copy_limits if stop_and_copy else settings.limits
        migration_id = f"{workplace.instance.description.incarnation_id}-{next(self._numbers)}"
        try:
            link = self._link(target)
            outgoing = OutgoingMigration(migration_id, tracked, link, limits, workplace)
            self._outgoing[migration_id] = outgoing
            outgoing.start()
        except PenstockError as error:
            self._outgoing.pop(migration_id, None)
            return MigrationOutcome(False, str(error))
        try:
            return await asyncio.shield(outgoing.outcome)
        except asyncio.CancelledError:
            outgoing.handle(Cancel("the order was withdrawn"))
            raise
        finally:
            outgoing.outcome.add_done_callback(lambda _: self._departed(outgoing))

    def _obstacle(self, request_id: str, target_id: str) -> str:
        """Why a migration cannot even be queued; empty if it can."""
        instance = self._workplace.instance
        tracked = instance.table.find(request_id)
        if self._is_stopping:
            return "the worker is stopping"
        if instance.transfer_obstacle:
            return f"no request can leave this worker: {instance.transfer_obstacle}"
        if tracked is None or tracked.state != "running":
            return f"request {request_id} does not run here; see `penstock status` or ListRequests"
        if request_id in self._ordered:
            return f"request {request_id} is being moved already"
        if target_id == instance.description.instance_id:
            return f"request {request_id} is on {target_id} already"
        if self._peer(target_id) is None:
            known = ", ".join(member.member_id for member in self.peers()) or "none"
            return f"{target_id} is no instance that could take it; those of the same model and engine: {known}"
        return ""

    def _runs(self, tracked: TrackedRequest) -> bool:
        here = self._workplace.instance.table.find(tracked.request.request_id)
        return here is tracked and tracked.state == "running"

    def _peer(self, instance_id: str) -> Member | None:
        return next((member for member in self.peers() if member.member_id == instance_id), None)

    def _link(self, target: Member) -> TargetLink:
        """The stream to this incarnation of the target, opened if there is none between the addresses of now."""
        own = self._workplace.instance.description
        kv_address = self._workplace.engine.kv_address
        key = (target.member_id, target.incarnation_id, target.address, own.address, kv_address)
        link = self._links.get(key)
        if link is None:
            hello = source_hello(own.instance_id, own.incarnation_id, own.address, kv_address)
            link = TargetLink(target, hello, self._receive, self._workplace.settings.unsent_messages, self._transport)
            self._links[key] = link
            self._workplace.tasks.spawn(self._run_link(key, link), name=f"link {target.member_id}")
        return link

    async def _run_link(self, key: LinkKey, link: TargetLink) -> None:
        try:
            reason = await link.run()
            log.info("a migration stream ended", extra={"instance_id": link.target.member_id, "reason": reason})
        finally:
            del self._links[key]
            for outgoing in list(self._outgoing.values()):
                if outgoing.link is link:
                    outgoing.handle(TargetLost())

    def _receive(self, message: migration_pb2.TargetMessage) -> None:
        said = wire.to_source(message)
        outgoing = self._outgoing.get(said.migration_id)
        if outgoing is not None:
            outgoing.handle(said)

    def _look(self) -> None:
        self._lanes.look()
        for outgoing in list(self._outgoing.values()):
            outgoing.look()

    def _departed(self, outgoing: OutgoingMigration) -> None:
        self._outgoing.pop(outgoing.migration_id, None)
        self._departed_s[outgoing.request_id] = self._workplace.clock()

    def _was_moving(self, request_id: str) -> bool:
        moves_away = any(outgoing.request_id == request_id for outgoing in self._outgoing.values())
        return moves_away or request_id in self._departed_s or self.arrivals.remembers(request_id)

    def _keep_abort(self, request_id: str) -> bool:
        return any(
            outgoing.keep_abort() for outgoing in list(self._outgoing.values()) if outgoing.request_id == request_id
        )
