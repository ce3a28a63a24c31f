"""Links to all workers of the mesh, following the directory, for as long as `LinkManager` says."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from controlplane.model.incarnation import Incarnation
from controlplane.protocols.worker_links import (
    Joined,
    Leave,
    Left,
    LinkManager,
    Looked,
    Open,
    Reconnect,
    Retire,
    Return,
)
from mesh.invariants import invariants
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import worker_pb2
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.hang_watch import HangWatch
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.liveness import LivenessMonitor
from services.frontend.workers.relay import RelayRegistry

log = logging.getLogger(__name__)

WORKER_ROLE = "worker"
TICK_S = 0.1


@dataclass(slots=True)
class _Adopting:
    """A request whose choices are asked for."""

    question: int
    take: Callable[[Incarnation, worker_pb2.AdoptedRequest], None]
    asked: set[Incarnation] = field(default_factory=set)
    """Those that have not answered yet."""
    has_all: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerPool:
    """One link for each incarnation of a worker; those that left stay until their last request has ended."""

    def __init__(
        self,
        frontend_id: str,
        metrics: FrontendMetrics,
        clock: Callable[[], float],
        transport: Transport,
        on_failed: Callable[[BaseException], None],
        liveness: LivenessMonitor,
    ) -> None:
        """`on_failed` is told when a link died by a bug of ours."""
        self._frontend_id = frontend_id
        self._clock = clock
        self._transport = transport
        self._on_failed = on_failed
        self._manager = LinkManager()
        self._links: dict[str, WorkerLink] = {}
        self._all_links: dict[Incarnation, WorkerLink] = {}
        """With those of workers that have left and still finish requests."""
        self.relays = RelayRegistry(metrics, self._all_links, clock)
        self._adopting: dict[str, _Adopting] = {}
        """Requests that a client came back for, by its request id, while workers are asked for them."""
        self._questions = itertools.count(1)
        self._tasks = TaskSet("worker-pool")
        self._hangs = HangWatch(liveness, transport, metrics, self._tasks, on_failed)
        self._watch: asyncio.Task[None] | None = None
        self.news = 0
        """How often a worker has joined or connected."""
        self._has_news = asyncio.Event()
        self.on_links: Callable[[tuple[Incarnation, ...]], None] = lambda _: None
        """Hears which workers take requests from this frontend, whenever that has changed."""
        self._told: tuple[Incarnation, ...] = ()

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; changes of other roles are ignored."""
        if change.member.role != WORKER_ROLE:
            return
        if change.kind is ChangeKind.JOINED:
            self._join(change.member)
        elif change.kind is ChangeKind.CHANGED:
            self._readdress(change.member)
        else:
            self._leave(change.member)

    def link(self, instance_id: str) -> WorkerLink | None:
        """The link to an instance that is in the mesh."""
        return self._links.get(instance_id)

    def links(self) -> tuple[WorkerLink, ...]:
        """All links to workers that are in the mesh, by instance id."""
        return tuple(self._links[instance_id] for instance_id in sorted(self._links))

    def connected(self, model: str) -> tuple[WorkerLink, ...]:
        """Those that take requests for a model, by instance id."""
        return tuple(link for link in self.links() if link.is_connected and link.model == model)

    async def wait_connected(self, instance_id: str, timeout_s: float) -> WorkerLink | None:
        """The link to an instance once it is connected; None if that does not happen in time."""
        link = self._links.get(instance_id)
        if link is not None and link.is_connected:
            return link
        try:
            async with asyncio.timeout(timeout_s):
                # Anew each time: a worker that restarts has another link.
                while (link := self._links.get(instance_id)) is None or not link.connected.is_set():
                    await self._wait_for_news(self.news)
        except TimeoutError:
            return None
        return link if link.is_connected else None

    async def wait_for_news(self, seen: int, timeout_s: float) -> bool:
        """Return once `news` is beyond `seen`, or False after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_for_news(seen)
        except TimeoutError:
            return False
        return True

    def wake(self) -> None:
        """Let all who wait for news look again."""
        self._tell_links()
        self.news += 1
        self._has_news.set()

    def _tell_links(self) -> None:
        connected = tuple(link.sender for link in self.links() if link.is_connected)
        if connected != self._told:
            self._told = connected
            self.on_links(connected)

    async def _wait_for_news(self, seen: int) -> None:
        while self.news == seen:
            self._has_news.clear()
            await self._has_news.wait()

    async def adopt(
        self, client_request_id: str, take: Callable[[Incarnation, worker_pb2.AdoptedRequest], None], timeout_s: float
    ) -> None:
        """Take over all that the workers have of a client's request. `take` is called for each choice that one has, in
        the same turn of the loop in which its worker told of it: its next tokens may follow at once."""
        if client_request_id in self._adopting:
            return  # two connections at once ask for the same stream: one gets it
        adopting = self._adopting[client_request_id] = _Adopting(next(self._questions), take)
        try:
            links, question = self._all_links.values(), adopting.question
            adopting.asked = {link.sender for link in links if link.adopt(client_request_id, question)}
            if adopting.asked:
                async with asyncio.timeout(timeout_s):
                    await adopting.has_all.wait()
        except TimeoutError:
            log.warning("not all workers said what they have of a request", extra={"request_id": client_request_id})
        finally:
            del self._adopting[client_request_id]

    def _on_adopted(self, sender: Incarnation, adopted: worker_pb2.Adopted) -> None:
        adopting = self._adopting.get(adopted.client_request_id)
        if adopting is not None and adopting.question != adopted.question and sender in adopting.asked:
            return  # it was asked again, and tells of the same choices in their next lives
        if adopting is None or adopting.question != adopted.question:  # too late: give them back
            if (link := self._all_links.get(sender)) is not None:
                for late in adopted.requests:
                    link.release(late.request.request_id, late.request.epoch)
            return
        for request in adopted.requests:
            adopting.take(sender, request)
        adopting.asked.discard(sender)
        if not adopting.asked:
            adopting.has_all.set()

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        self.relays.validate()
        self._hangs.validate()
        self._manager.validate()
        for instance_id, link in self._links.items():
            assert link.instance_id == instance_id, "kept by its own id"
            assert self._all_links.get(link.sender) is link, f"nobody watches the link to {instance_id}"

    async def stop(self) -> None:
        """Close all streams; the workers abort what still runs on them."""
        self._links.clear()
        self._all_links.clear()
        self._manager = LinkManager()
        await self._tasks.cancel()

    def _join(self, member: Member) -> None:
        instructions = self._manager.handle(Joined(Incarnation(member.member_id, member.incarnation_id)))
        for instruction in instructions:
            match instruction:
                case Leave(worker):
                    self._all_links[worker].leaving = True
                case Open():
                    self._links[member.member_id] = self._open(member)
                case Return(worker):
                    link = self._links[member.member_id] = self._all_links[worker]
                    link.leaving = False  # it had only lost its lease
        if not instructions:
            return
        if self._watch is None:
            self._watch = self._tasks.spawn(self._tick_forever(), name="watch", on_error=self._on_failed)
        self.wake()
        log.info("worker joined", extra={"instance_id": member.member_id, "address": member.address})

    def _open(self, member: Member) -> WorkerLink:
        link = WorkerLink(
            member,
            self._frontend_id,
            self.relays,
            self._clock,
            self._transport,
            on_connected=self.wake,
            on_unusable=self._tell_links,
            on_adopted=self._on_adopted,
        )
        self._all_links[link.sender] = link
        self._tasks.spawn(link.run(), name=member.member_id, on_error=self._on_failed)
        return link

    def _readdress(self, member: Member) -> None:
        link = self._links.get(member.member_id)
        if link is not None and link.member.incarnation_id == member.incarnation_id:
            log.info("worker moved", extra={"instance_id": member.member_id, "address": member.address})
            link.readdress(member)

    def _leave(self, member: Member) -> None:
        for instruction in self._manager.handle(Left(Incarnation(member.member_id, member.incarnation_id))):
            link = self._links.pop(instruction.worker.instance_id)
            link.leaving = True
            self._tell_links()
            log.info("worker left", extra={"instance_id": member.member_id, "requests": link.requests})

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._tick(self._clock())

    def _tick(self, now_s: float) -> None:
        self.relays.tick()
        owned = self.relays.owned()
        self._hangs.tick(self._all_links, owned, now_s)
        moved = {sender for sender, link in self._all_links.items() if link.has_moved}
        for instruction in self._manager.handle(Looked(owned, moved)):
            match instruction:
                case Retire(worker):
                    self._all_links.pop(worker).retired.set()
                case Reconnect(worker):
                    self._all_links[worker].reconnect()
