"""Responses that are made while their clients may be away: `background` of OpenAI's Responses.

One frontend makes such a response. Before it promises it to the client, it entrusts it to another frontend, which goes
on with it where the first one leaves or is lost: no promise depends on one process. Any frontend answers for it.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final

import grpc

from mesh.errors import PeerUnavailable
from mesh.invariants import invariants
from mesh.membership import Member
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2
from services.frontend.errors import ApiError, bad_request, unavailable
from services.frontend.metrics import FrontendMetrics
from services.frontend.requests.frontend_peers import PEER_DEADLINE_S, FrontendPeers
from services.frontend.requests.response_store import StoredResponse
from services.frontend.requests.running_response import (
    BackgroundWork,
    Ended,
    ResponseStatus,
    RunningResponse,
    Stop,
    number_behind,
    split_events,
)
from services.frontend.requests.shared_responses import SharedResponses

log = logging.getLogger(__name__)

MOST_ASKED: Final = 3
"""Frontends that are asked, one after the other, to go on with a response: its client waits meanwhile."""
ENTRUSTED_EVERY_S: Final = 1.0
"""How often it is looked whether the frontend is still there that is to go on with a response."""
MOST_PAUSE_S: Final = 30.0
"""Between two rounds of asking, where nobody takes it."""
ENDING_S: Final = 1.0
"""What requests that were ended are given to see it."""


@dataclass(frozen=True, slots=True)
class _Ward:
    """Work of another frontend, which is its `maker`."""

    work: BackgroundWork
    maker: tuple[str, str]
    """Its member id and incarnation."""
    until_s: float
    """By then it has ended, if its maker lives."""


class BackgroundResponses:
    """Those that this frontend makes, and those that it is to go on with."""

    def __init__(
        self,
        shared: SharedResponses,
        peers: FrontendPeers,
        own: tuple[str, str],
        max_bytes: int,
        deadline_s: float,
        clock: Callable[[], float],
        metrics: FrontendMetrics,
    ) -> None:
        """`own`: this frontend's member id and incarnation; `max_bytes`: of the events of all that run, and of all that
        is entrusted here; `deadline_s`: of a request."""
        self._shared = shared
        self._peers = peers
        self._own = own
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._clock = clock
        self._metrics = metrics
        self._running: dict[str, RunningResponse] = {}
        self._events_bytes = 0
        self._wards: OrderedDict[str, _Ward] = OrderedDict()
        self._wards_bytes = 0
        self._tasks = TaskSet("background responses")
        self.go_on: Callable[[RunningResponse], Coroutine[Any, Any, Ended | None]] | None = None
        """Makes one that another frontend had begun."""
        peers.on_left.append(self._take_over)
        metrics.background_responses.set_function(lambda: len(self._running))

    def running(self, response_id: str, owner: str) -> RunningResponse | None:
        """One of this owner's that is being made here."""
        found = self._running.get(response_id)
        return None if found is None or found.work.queued.owner != owner else found

    def has(self, response_id: str) -> bool:
        """Whether it is made or kept here, or would be gone on with."""
        return response_id in self._running or response_id in self._wards or response_id in self._shared.store

    def begin(self, work: BackgroundWork) -> RunningResponse:
        """One that is to be made here: `make` it."""
        running = self._running[work.response_id] = RunningResponse(work, self._reserve)
        return running

    def make(self, running: RunningResponse, making: Coroutine[Any, Any, Ended | None]) -> asyncio.Future[Ended | None]:
        """Go on until `making` returns how it has ended; None: another frontend has it now."""
        future = running.making = asyncio.ensure_future(making)
        running.task = self._tasks.spawn(self._see_through(running, future), name=f"make {running.work.response_id}")
        return future

    def forget(self, running: RunningResponse) -> None:
        """It was never promised, or is not wanted any more."""
        self._running.pop(running.work.response_id, None)
        running.leave_events()
        running.stop(Stop.FORGOTTEN)

    async def entrust(self, running: RunningResponse) -> None:
        """Have another frontend go on with it if this one is lost, and a further one where that is lost first. Returns
        once the others have been asked: without any, or where none takes it, it goes on here alone."""
        running.entrusting = self._tasks.spawn(
            self._keep_entrusted(running), name=f"entrust {running.work.response_id}"
        )
        await running.was_entrusted.wait()

    async def find(self, response_id: str, owner: str) -> StoredResponse | None:
        """One that is made, or kept, by any frontend. Raises ApiError (503) where not all could be asked."""
        running = self.running(response_id, owner)
        return running.state() if running is not None else await self._shared.find(response_id, owner)

    async def cancel(self, response_id: str, owner: str) -> StoredResponse | None:
        """End one that is made by any frontend, and return it as it has ended; one that has ended already is returned
        as it is. Raises ApiError (503) where not all could be asked."""
        cancelled = await self.cancel_here(response_id, owner)
        if cancelled is not None:
            return cancelled
        found = await self._shared.locate(response_id, owner)
        if found is None or found.peer is None or not found.response.is_running:
            return None if found is None else found.response
        request = frontend_pb2.CancelResponseRequest(response_id=response_id, owner=owner)
        try:
            answer = await self._peers.stub(found.peer).CancelResponse(request, timeout=PEER_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise _lost(found.peer, error) from error
        if answer.HasField("response"):
            return StoredResponse.from_message(answer.response)
        return await self._shared.find(response_id, owner)

    async def cancel_here(self, response_id: str, owner: str) -> StoredResponse | None:
        """The same of one that is made here; None: there is none, or another frontend has it by now."""
        running = self.running(response_id, owner)
        if running is None or running.making is None:
            return None
        running.stop(Stop.CANCELLED)
        await asyncio.wait({running.making})
        ended = _ended(running, running.making)
        return None if ended is None else replace(running.work.queued, response=ended.response)

    async def events(self, response_id: str, owner: str, after: int | None) -> AsyncGenerator[bytes, None] | None:
        """Those of a response that was asked for as a stream, behind the one of that number, from the frontend that
        makes or keeps it; None: there is no such response. Raises ApiError: 400 where its events are not kept, 503
        where not all frontends could be asked."""
        here = self.events_here(response_id, owner, after)
        if here is not None:
            return here
        found = await self._shared.locate(response_id, owner)
        if found is None:
            return None
        if found.peer is None or not found.response.is_running:
            return _kept(response_id, found.response, after)
        return await self._events_of(found.peer, response_id, owner, after)

    def events_here(self, response_id: str, owner: str, after: int | None) -> AsyncGenerator[bytes, None] | None:
        """The same of one that is made or kept here."""
        running = self.running(response_id, owner)
        if running is not None:
            if not running.work.is_streamed:
                raise _no_events(response_id)
            return running.follow(after)
        kept = self._shared.store.find(response_id, owner)
        return None if kept is None else _kept(response_id, kept, after)

    async def _events_of(
        self, peer: Member, response_id: str, owner: str, after: int | None
    ) -> AsyncGenerator[bytes, None]:
        request = frontend_pb2.FollowResponseRequest(response_id=response_id, owner=owner, after=after)
        call = self._peers.stub(peer).FollowResponse(request, timeout=self._deadline_s)

        async def rest() -> AsyncGenerator[bytes, None]:
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    yield message.events
            except grpc.aio.AioRpcError as error:
                log.warning("a stream of another frontend's response broke off", extra={"error": error.details()})
            finally:
                call.cancel()

        try:
            await call.read()  # empty: the frontend has it
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                raise _no_events(response_id) from error
            raise _lost(peer, error) from error
        return rest()

    async def drop(self, response_id: str, owner: str) -> bool:
        """Forget it everywhere; whether there was one of this owner's. Raises ApiError (503) where not all frontends
        could be asked."""
        was_here = self._drop_work(response_id, owner)
        return await self._shared.drop(response_id, owner) or was_here

    def drop_here(self, response_id: str, owner: str) -> bool:
        """The same at this frontend."""
        was_made = self._drop_work(response_id, owner)
        return self._shared.store.drop(response_id, owner) or was_made

    def _drop_work(self, response_id: str, owner: str) -> bool:
        ward = self._wards.get(response_id)
        if ward is not None and ward.work.queued.owner == owner:
            self._forget_ward(response_id)
        running = self.running(response_id, owner)
        if running is None:
            return False
        self.forget(running)
        return True

    def keep_copy(self, message: frontend_pb2.StoredResponse) -> None:
        """What another frontend has made of a response: nobody need go on with it. Raises ValueError for what none
        sends."""
        self._forget_ward(message.response_id)
        if self._shared.store.find(message.response_id, message.owner) is not None:
            return  # it came to its end here first, and may have been read
        self._shared.keep_copy(message)
        running = self.running(message.response_id, message.owner)
        if running is not None:
            running.stop(Stop.MADE_ELSEWHERE)

    def take(self, request: frontend_pb2.EntrustResponseRequest) -> bool:
        """Go on with the work of another frontend once it is lost; False: there is no room for it. Raises
        PeerUnavailable for a frontend that is not known here, and ValueError for what none sends."""
        maker = request.frontend_id, request.incarnation_id
        if maker not in {(member.member_id, member.incarnation_id) for member in self._peers.members()}:
            raise PeerUnavailable(f"the frontend {maker[0]} is not known here, so that nobody would see it leave")
        work = BackgroundWork.from_message(request.work)
        now_s = self._clock()
        for response_id in [key for key, ward in self._wards.items() if ward.until_s < now_s]:
            self._forget_ward(response_id)
        if self._wards_bytes + work.size_bytes > self._max_bytes:
            return False
        self._forget_ward(work.response_id)
        if self._shared.store.find(work.response_id, work.queued.owner) is None:
            self._wards[work.response_id] = _Ward(work, maker, now_s + self._deadline_s + PEER_DEADLINE_S)
            self._wards_bytes += work.size_bytes
        return True

    async def drained(self) -> None:
        """Return once none is made here any more, and others have copies."""
        while tasks := self._making():
            await asyncio.wait(tasks)
        await self._shared.copied()

    async def stop(self) -> None:
        """Give up what is made here; whoever it is entrusted to goes on with it. Call it once the requests have been
        ended: one that is cancelled instead is taken back from its worker, and would have to be begun anew."""
        if tasks := self._making():
            await asyncio.wait(tasks, timeout=ENDING_S)
        making = [each.making for each in self._running.values() if each.making is not None]
        for running in list(self._running.values()):
            running.stop(Stop.PROCESS_STOPS)
        await self._tasks.cancel()
        await asyncio.gather(*making, return_exceptions=True)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken` where what is counted is not what is there."""
        assert self._events_bytes == sum(each.events_bytes for each in self._running.values()), self._events_bytes
        assert self._wards_bytes == sum(each.work.size_bytes for each in self._wards.values()), self._wards_bytes
        assert all(each.task is not None for each in self._running.values()), "each is seen through"

    def _making(self) -> set[asyncio.Task[None]]:
        return {each.task for each in self._running.values() if each.task is not None}

    async def _see_through(self, running: RunningResponse, making: asyncio.Future[Ended | None]) -> None:
        try:
            await asyncio.wait({making})
            ended = _ended(running, making)
            if ended is None or self._running.get(running.work.response_id) is not running:
                return
            queued = running.work.queued
            messages = queued.messages if ended.turn is None else (*queued.messages, ended.turn)
            events = b"".join(running.events) if running.work.is_streamed else b""
            stored = StoredResponse.of(ended.response, messages, queued.owner, events)
            self._shared.keep(running.work.response_id, stored, first=running.holder)
        finally:
            making.cancel()
            if running.entrusting is not None:
                running.entrusting.cancel()
            running.end()
            if self._running.get(running.work.response_id) is running:
                del self._running[running.work.response_id]

    async def _keep_entrusted(self, running: RunningResponse) -> None:
        await self._entrust(running)
        if running.holder is None and self._peers.members():
            log.warning("no frontend goes on with a response", extra={"response_id": running.work.response_id})
            self._metrics.uncopied_responses.inc()
        running.was_entrusted.set()
        pause_s = ENTRUSTED_EVERY_S
        while True:
            await asyncio.sleep(pause_s)
            known = {member.incarnation_id for member in self._peers.members()}
            if running.holder is None or running.holder.incarnation_id not in known:
                await self._entrust(running)
            # Some are megabytes, and nobody may have room.
            pause_s = ENTRUSTED_EVERY_S if running.holder is not None else min(2 * pause_s, MOST_PAUSE_S)

    async def _entrust(self, running: RunningResponse) -> None:
        running.holder = None
        frontend_id, incarnation_id = self._own
        request = frontend_pb2.EntrustResponseRequest(
            work=running.work.to_message(), frontend_id=frontend_id, incarnation_id=incarnation_id
        )
        for peer in self._shared.peers(running.work.response_id)[:MOST_ASKED]:
            try:
                await self._peers.stub(peer).EntrustResponse(request, timeout=PEER_DEADLINE_S)
            except grpc.aio.AioRpcError as error:
                extra = {"response_id": running.work.response_id, "frontend": peer.member_id, "error": error.details()}
                log.info("a frontend does not take a response in the background", extra=extra)
            else:
                running.holder = peer
                return

    def _take_over(self, member: Member) -> None:
        maker = member.member_id, member.incarnation_id
        for ward in [each for each in self._wards.values() if each.maker == maker]:
            self._forget_ward(ward.work.response_id)
            running = self.begin(ward.work)
            self.make(running, self._go_on_with(running))

    async def _go_on_with(self, running: RunningResponse) -> Ended | None:
        work = running.work
        with suppress(ApiError):  # of whom cannot be asked nothing is known
            if await self._shared.find(work.response_id, work.queued.owner) is not None:
                return None
        assert self.go_on is not None, "it is set before the first member is known"
        self._metrics.taken_over_responses.inc()
        log.info("going on with a response of a frontend that has left", extra={"response_id": work.response_id})
        await self.entrust(running)
        return await self.go_on(running)

    def _forget_ward(self, response_id: str) -> None:
        ward = self._wards.pop(response_id, None)
        if ward is not None:
            self._wards_bytes -= ward.work.size_bytes

    def _reserve(self, size_bytes: int) -> bool:
        if self._events_bytes + size_bytes > self._max_bytes:
            return False
        self._events_bytes += size_bytes
        return True


def _ended(running: RunningResponse, making: asyncio.Future[Ended | None]) -> Ended | None:
    if making.cancelled():
        if running.stopped is not Stop.CANCELLED:
            return None
        return Ended(running.without_output(ResponseStatus.CANCELLED))
    error = making.exception()
    if error is None:
        return making.result()
    log.error("a response failed by a bug", exc_info=error, extra={"response_id": running.work.response_id})
    return Ended(running.without_output(ResponseStatus.FAILED))


async def _kept_events(events: bytes, after: int | None) -> AsyncGenerator[bytes, None]:
    yield b"".join(islice(split_events(events), number_behind(after), None))


def _kept(response_id: str, kept: StoredResponse, after: int | None) -> AsyncGenerator[bytes, None]:
    if not kept.events:
        raise _no_events(response_id)
    return _kept_events(kept.events, after)


def _no_events(response_id: str) -> ApiError:
    return bad_request(
        f"Response `{response_id}` has no events to be streamed: it was not created with both `background` and "
        "`stream`, was begun anew after its frontend was lost, or has too many. Ask for it without `stream`.",
        "stream",
    )


def _lost(peer: Member, error: grpc.aio.AioRpcError) -> ApiError:
    log.warning("a frontend could not be asked", extra={"frontend": peer.member_id, "error": error.details()})
    return unavailable(f"The frontend {peer.member_id}, which makes the response, could not be asked; try again.")
