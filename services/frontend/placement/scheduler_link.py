"""The link to one scheduler: its stream, its circuit breaker, and the placements that it has not answered yet."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from controlplane.model.frontend_links import MAX_LINKS
from controlplane.model.incarnation import Incarnation
from controlplane.protocols.circuit_breaker import CircuitBreaker
from mesh.errors import PeerUnavailable
from mesh.membership import Member
from mesh.rpc.peer_stream import PeerStream, StreamHandlers
from mesh.runtime import Transport
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.frontend.metrics import PlacementMetrics

log = logging.getLogger(__name__)

WAIT_S: Final = 0.05
"""How long the word that a request has ended, or that a worker is connected, may wait for company."""

_Stream = PeerStream[scheduler_pb2.SchedulerMessage, scheduler_pb2.PlaceResponse]


@dataclass(frozen=True, slots=True)
class AnswerHandlers:
    """What whoever asked for a placement wants to hear; one of the two is called, once. Must not block."""

    on_answer: Callable[[scheduler_pb2.PlaceResponse], None]
    on_miss: Callable[[str], None]
    """Why there is no answer that could be used."""


@dataclass(frozen=True, slots=True)
class LinkHandlers:
    """What the owner of a link wants to hear. Must not block."""

    on_usable: Callable[[str], None]
    """It may be asked now; with the id of the scheduler that is to be asked instead, if it named one."""
    on_lost: Callable[[], None]
    """The stream ended; it is opened again by itself."""


@dataclass(frozen=True, slots=True)
class _Asked:
    handlers: AnswerHandlers
    deadline: asyncio.TimerHandle


def link_key(member: Member) -> str:
    """Tells the links to the incarnations of the schedulers apart."""
    return f"{member.member_id}/{member.incarnation_id}"


class SchedulerLink:
    """One incarnation of a scheduler. It may be asked while its stream is open and its breaker closed.

    A miss is a placement without an answer by its deadline, the answer that the scheduler is not ready, or the loss of
    the stream. It opens the breaker and gives up on everything else that was asked.
    """

    def __init__(
        self,
        member: Member,
        deadline_s: float,
        metrics: PlacementMetrics,
        clock: Callable[[], float],
        transport: Transport,
        handlers: LinkHandlers,
        frontend_id: str,
    ) -> None:
        """`frontend_id`: who asks, by the name under which workers know this frontend."""
        self.member = member
        self._frontend_id = frontend_id
        self.is_announced = True
        """Whether the directory knows it."""
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._clock = clock
        self._handlers = handlers
        self._peer = f"scheduler {member.member_id}"
        self.breaker = CircuitBreaker(self._peer, clock())
        metrics.scheduler_usable.labels(member.member_id).set(0)
        self._asked: dict[str, _Asked] = {}
        self._ended: list[scheduler_pb2.RequestEnded] = []
        self._workers: tuple[Incarnation, ...] = ()
        self._workers_untold = False
        self._flush: asyncio.TimerHandle | None = None
        self._look = asyncio.Event()
        """Set when a probe may be due at another time than before."""
        self._stream: _Stream = PeerStream(
            self._peer,
            member.address,
            transport,
            lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).PlaceStream,  # type: ignore[no-untyped-call]
            StreamHandlers(self._opened, self._answered, self._lost),
            member.role,
        )

    @property
    def key(self) -> str:
        """Of this incarnation, among all links."""
        return link_key(self.member)

    @property
    def is_open(self) -> bool:
        """Whether the stream is open."""
        return self._stream.is_open

    @property
    def transport_name(self) -> str:
        """See `PeerStream.transport_name`."""
        return self._stream.transport_name

    @property
    def is_usable(self) -> bool:
        """Whether placements may be asked for."""
        return self.breaker.is_closed and self._stream.is_open

    @property
    def outstanding(self) -> int:
        """Placements asked for and not answered, those that were decided elsewhere meanwhile included."""
        return len(self._asked)

    def readdress(self, member: Member) -> None:
        """The same scheduler is announced, perhaps at another address, to which the stream goes when this one ends."""
        if member.address != self.member.address:
            self._stream.readdress(member.address)
        self.member = member

    def ask(self, request: scheduler_pb2.PlaceRequest, handlers: AnswerHandlers) -> None:
        """Ask for a placement. `handlers` may be called before this returns."""
        self._forget(request.request_id)
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(self._deadline_s, self._miss, "deadline", self._silence())
        self._asked[request.request_id] = _Asked(handlers, deadline)
        try:
            self._send(request)
        except PeerUnavailable as error:
            self._miss("lost", str(error))

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """Tell how a request ended that was asked for here, with the next placement or soon after. While the stream is
        down that is not worth keeping: the scheduler forgets what no worker reports."""
        if not self._stream.is_open:
            return
        self._ended.append(scheduler_pb2.RequestEnded(request_id=request_id, ok=ok, reason=reason))
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(WAIT_S, self._send, None)

    def tell_workers(self, workers: tuple[Incarnation, ...]) -> None:
        """The workers that this frontend is connected to, with the next placement or soon after: at its start they come
        one by one."""
        self._workers, self._workers_untold = workers[:MAX_LINKS], True
        if self._stream.is_open and self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(WAIT_S, self._send, None)

    async def run(self) -> None:
        """Keep the stream open, and probe the scheduler while the breaker is not closed, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._stream.run())
                tasks.create_task(self._keep_probing())
        finally:
            if self._flush is not None:
                self._flush.cancel()
            self._give_up("this frontend uses it no more")

    def _send(self, place: scheduler_pb2.PlaceRequest | None) -> None:
        """A placement to ask for, and what has ended. Raises PeerUnavailable only for the former."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        ended, self._ended = self._ended, []
        message = scheduler_pb2.SchedulerMessage(place=place, ended=ended)
        if self._workers_untold:
            # Before the placement: it is decided by what this says. A frontend without workers says so, too.
            message.links.SetInParent()
            message.links.frontend_id = self._frontend_id
            for worker in self._workers:
                message.links.workers.add(instance_id=worker.instance_id, incarnation_id=worker.incarnation_id)
        try:
            self._stream.send(message)
            self._workers_untold = False
        except PeerUnavailable as error:
            log.warning("a scheduler was not told of requests' ends", extra={"lost": len(ended), "error": str(error)})
            if place is not None:
                raise

    def _opened(self) -> None:
        self.tell_workers(self._workers)
        self.breaker.wake(self._clock())
        self._look.set()

    def _lost(self, reason: str) -> None:
        self._ended.clear()
        self._miss("lost", f"the stream to {self._peer} ended: {reason}")
        self._handlers.on_lost()

    def _answered(self, response: scheduler_pb2.PlaceResponse) -> None:
        asked = self._asked.pop(response.request_id, None)
        if asked is None:  # it missed the deadline, but it lives
            self.breaker.wake(self._clock())
            self._look.set()
            return
        asked.deadline.cancel()
        if response.outcome == scheduler_pb2.PLACE_OUTCOME_NOT_READY:
            asked.handlers.on_miss(response.message)
            self._miss("not_ready", response.message)
        else:
            asked.handlers.on_answer(response)

    def _miss(self, kind: str, reason: str) -> None:
        opened = self.breaker.miss(self._clock())
        self._metrics.scheduler_misses.labels(self.member.member_id, kind).inc()
        self._metrics.scheduler_usable.labels(self.member.member_id).set(0)
        if opened:
            log.error("not asking a scheduler until it answers a probe", extra={"peer": self._peer, "reason": reason})
        self._look.set()
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """On everything that was asked."""
        asked, self._asked = self._asked, {}
        for each in asked.values():
            each.deadline.cancel()
            each.handlers.on_miss(reason)

    def _forget(self, request_id: str) -> None:
        asked = self._asked.pop(request_id, None)
        if asked is not None:
            asked.deadline.cancel()

    def _silence(self) -> str:
        return f"{self._peer} did not answer within {self._deadline_s:g} s"

    async def _keep_probing(self) -> None:
        while True:
            due_s = self.breaker.probe_due_s - self._clock() if self._may_probe() else None
            if due_s is not None and due_s <= 0:
                await self._probe()
                continue
            self._look.clear()
            try:
                async with asyncio.timeout(due_s):
                    await self._look.wait()
            except TimeoutError:
                pass  # the probe is due

    def _may_probe(self) -> bool:
        return self._stream.is_open and not self.breaker.is_closed

    async def _probe(self) -> None:
        channel = self._stream.channel
        assert channel is not None, "the stream is open"
        self.breaker.begin_probe(self._clock())
        stub = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        ready = scheduler_pb2.ReadyResponse()
        try:
            ready = await stub.Ready(scheduler_pb2.ReadyRequest(), timeout=self._deadline_s)
        except grpc.aio.AioRpcError as error:
            log.debug("a probe failed", extra={"peer": self._peer, "code": error.code().name})
        self.breaker.end_probe(ready.is_ready and self._stream.is_open, self._clock())
        if self.breaker.is_closed:
            log.info("scheduler can be asked", extra={"peer": self._peer, "address": self.member.address})
            self._metrics.scheduler_usable.labels(self.member.member_id).set(1)
            self._handlers.on_usable(ready.leader_id)
