"""The other schedulers of the mesh: told of this one's placements, heard of theirs.

Two schedulers that place by the same loads would both choose the idlest instance until it reports. What one has placed
counts in the others within milliseconds. Nothing here is lost that matters: what does not arrive is what a scheduler
knew of others before there was sharing, and is made up for by the instances' next reports.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from controlplane.model.shared_event import SharedEvent, SharedKind
from controlplane.scheduler import wire
from controlplane.scheduler.metrics import SchedulerMetrics
from controlplane.scheduler.placement_service import PlacementService
from mesh.errors import PeerUnavailable
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.peer_stream import PeerStream, StreamHandlers
from mesh.runtime import Clock, Transport
from mesh.tasks import TaskSet
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.002
"""What is told waits so long for company."""
MAX_EVENTS: Final = 4096
"""Placements and endings in one message to another scheduler."""
MAX_MARKS: Final = 65_536
"""Marks of prompts in one such message, give or take a prompt: half a megabyte."""

_Stream = PeerStream[scheduler_pb2.SharedEvents, scheduler_pb2.ShareAccepted]


@dataclass(frozen=True, slots=True)
class _Peer:
    member: Member
    stream: _Stream
    run: asyncio.Task[None]


class Peers:
    """Follows the directory; one stream to each other scheduler."""

    def __init__(
        self,
        scheduler_id: str,
        transport: Transport,
        placements: PlacementService,
        metrics: SchedulerMetrics,
        clock: Clock,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """Give the placements `tell`, so that it tells what it places."""
        self._scheduler_id = scheduler_id
        self._transport = transport
        self._placements = placements
        self._metrics = metrics
        self._clock = clock
        self._on_failed = on_failed
        self._peers: dict[str, _Peer] = {}
        self._events: list[SharedEvent] = []
        self._marks = 0
        """Of all `_events`."""
        self._placed_s: list[float] = []
        """When the placements among `_events` were made, in seconds of Unix time."""
        self._flush: asyncio.TimerHandle | None = None
        self._synced = asyncio.Event()
        self._tasks = TaskSet("peers")

    def on_change(self, change: MemberChange) -> None:
        """A member came or went."""
        member = change.member
        if member.role != "scheduler" or member.member_id == self._scheduler_id:
            return
        known = self._peers.get(member.member_id)
        is_same = known is not None and known.member.incarnation_id == member.incarnation_id
        if known is not None and is_same and change.kind is ChangeKind.JOINED:
            known.stream.readdress(member.address)
            return
        if known is not None and (is_same or change.kind is ChangeKind.JOINED):
            del self._peers[member.member_id]
            known.run.cancel()
        if change.kind is ChangeKind.JOINED:
            self._open(member)

    def note_synced(self) -> None:
        """This scheduler knows the instances."""
        self._synced.set()

    def connected(self) -> tuple[str, ...]:
        """Ids of the schedulers that a stream is open to, so that they hear of placements made here."""
        return tuple(sorted(peer_id for peer_id, peer in self._peers.items() if peer.stream.is_open))

    def tell(self, event: SharedEvent) -> None:
        """Have an event told to every other scheduler, with the next message to it."""
        if not self._peers:
            return
        self._events.append(event)
        self._marks += len(event.marks)
        if event.kind is SharedKind.PREFILL:
            self._placed_s.append(self._clock.unix_s())
        if len(self._events) >= MAX_EVENTS or self._marks >= MAX_MARKS:
            self._send()
        elif self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self._send)

    async def stop(self) -> None:
        """Close the streams to the other schedulers; what they were not told they learn from reports."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        self._peers.clear()
        await self._tasks.cancel()

    async def take(self, context: Any) -> None:
        """Serve a stream of another scheduler's, to its end. Until this one knows the instances it reads nothing: it
        would be told of instances that it has never heard of."""
        await self._synced.wait()
        origin = ""
        while (message := await context.read()) is not grpc.aio.EOF:
            if not origin:
                origin = message.scheduler_id
                if not origin:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must name the scheduler")
                await context.write(scheduler_pb2.ShareAccepted(scheduler_id=self._scheduler_id))
                log.info("a scheduler shares its placements", extra={"peer": origin})
            self._note_age(message)
            for event in message.events:
                shared = wire.shared_event(event, origin)
                if shared is None:
                    continue  # of a later release
                self._metrics.shared.labels("counted" if self._placements.shared(shared) else "ignored").inc()

    def _note_age(self, message: scheduler_pb2.SharedEvents) -> None:
        """By the clocks of two hosts, which agree within milliseconds where they are kept."""
        if message.placed_unix_us:
            placements = sum(event.kind == scheduler_pb2.SHARED_KIND_PREFILL for event in message.events)
            age_s = self._clock.unix_s() - message.placed_unix_us / 1e6
            self._metrics.unseen_placement_seconds.inc(placements * max(0.0, age_s))

    def _open(self, member: Member) -> None:
        stream: _Stream = PeerStream(
            f"scheduler {member.member_id}",
            member.address,
            self._transport,
            lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).Share,  # type: ignore[no-untyped-call]
            StreamHandlers(lambda: self._greet(member.member_id), lambda accepted: None, lambda reason: None),
            member.role,
        )
        run = self._tasks.spawn(stream.run(), name=member.member_id, on_error=self._on_failed)
        self._peers[member.member_id] = _Peer(member, stream, run)

    def _greet(self, peer_id: str) -> None:
        """A scheduler that was just connected to is told of all that is open."""
        peer = self._peers.get(peer_id)
        if peer is None:
            return
        placements = self._placements.feed.table.open_placements()
        for first in range(0, max(1, len(placements)), MAX_EVENTS):
            self._send_to(peer, placements[first : first + MAX_EVENTS])

    def _send(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        events, self._events, self._marks = self._events, [], 0
        placed_s, self._placed_s = self._placed_s, []
        placed_unix_us = round(1e6 * sum(placed_s) / len(placed_s)) if placed_s else 0
        for peer in self._peers.values():
            if peer.stream.is_open:
                self._send_to(peer, events, placed_unix_us)

    def _send_to(self, peer: _Peer, events: Sequence[SharedEvent], placed_unix_us: int = 0) -> None:
        message = scheduler_pb2.SharedEvents(
            scheduler_id=self._scheduler_id,
            placed_unix_us=placed_unix_us,
            events=[wire.shared_event_message(event) for event in events],
        )
        try:
            peer.stream.send(message)
        except PeerUnavailable as error:
            self._metrics.unshared.inc(len(events))
            log.warning(
                "a scheduler is not told of placements", extra={"peer": peer.member.member_id, "error": str(error)}
            )
        else:
            self._metrics.shared.labels("sent").inc(len(events))
