"""Where a request goes: asked of the scheduler, decided here while no scheduler answers."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from mesh.errors import NoInstance, PeerUnavailable, UnknownModel
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.tasks import TaskSet
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.frontend.metrics import FrontendMetrics
from services.frontend.peer_stream import PeerStream, StreamHandlers

log = logging.getLogger(__name__)

SCHEDULER_ROLE: Final = "scheduler"
FALLBACK_POLICY: Final = "frontend_round_robin"
ENDED_WAIT_S: Final = 0.05
"""How long the word that a request has ended may wait for company."""

_Stream = PeerStream[scheduler_pb2.SchedulerMessage, scheduler_pb2.PlaceResponse]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes and who said so."""

    instance_id: str
    policy: str
    decode_instance_id: str = ""
    """Who decodes it after its first token; empty: the same instance."""
    is_decode_open: bool = False
    """The instance is to ask the scheduler who decodes, after the first token."""


class PlacementClient:
    """Asks one scheduler of the mesh over one stream; falls back, loudly, to round robin over the workers."""

    def __init__(
        self,
        candidates: Callable[[str], Sequence[str]],
        deadline_s: float,
        metrics: FrontendMetrics,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        """`candidates` gives the instances of a model that the fallback may choose from."""
        self._candidates = candidates
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._on_failed = on_failed
        self._waiting: dict[str, asyncio.Future[scheduler_pb2.PlaceResponse]] = {}
        self._turns: Counter[str] = Counter()
        """By model: the requests of several that come in turn must not meet on the same few instances."""
        self._schedulers: dict[str, Member] = {}
        self._member: Member | None = None
        self._stream: _Stream | None = None
        self._task: asyncio.Task[None] | None = None
        self._tasks = TaskSet("placement")
        self._ended: list[scheduler_pb2.RequestEnded] = []
        self._flush: asyncio.TimerHandle | None = None
        self.fallback = ""
        """Name of the fallback while it is in force, otherwise empty."""

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory: one scheduler is used, another one only when it leaves."""
        if change.member.role != SCHEDULER_ROLE:
            return
        if change.kind is ChangeKind.JOINED:
            self._schedulers[change.member.member_id] = change.member
        elif self._schedulers.get(change.member.member_id) == change.member:
            del self._schedulers[change.member.member_id]
        self._choose_scheduler()

    @property
    def connected(self) -> bool:
        """Whether a scheduler can be asked."""
        return self._stream is not None and self._stream.is_open

    async def place(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        """An instance for a request. Raises UnknownModel or NoInstance."""
        response = await self._ask(request)
        if response is None:
            return self._place_here(request)
        match response.outcome:
            case scheduler_pb2.PLACE_OUTCOME_PLACED:
                return Placement(
                    response.instance_id, response.policy, response.decode_instance_id, response.is_decode_open
                )
            case scheduler_pb2.PLACE_OUTCOME_UNKNOWN_MODEL:
                raise UnknownModel(response.message or f"no instance serves {request.model}")
            case _:
                raise NoInstance(response.message or f"no instance of {request.model} can take a request now")

    def ended(self, request_id: str, ok: bool, reason: str) -> None:
        """Tell the scheduler how a placed request ended, with the next placement or soon after. While it is away that
        is not worth keeping: it starts anew from the workers' reports."""
        if not self.connected:
            return
        self._ended.append(scheduler_pb2.RequestEnded(request_id=request_id, ok=ok, reason=reason))
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(ENDED_WAIT_S, self._send, None)

    async def stop(self) -> None:
        """Close the stream."""
        if self._flush is not None:
            self._flush.cancel()
        await self._tasks.cancel()

    async def _ask(self, request: scheduler_pb2.PlaceRequest) -> scheduler_pb2.PlaceResponse | None:
        """The scheduler's answer; None if it gave none within the deadline, or knows no instances yet."""
        if not self.connected:
            self._fall_back("no scheduler is connected")
            return None
        answer = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = answer
        try:
            self._send(request)
            async with asyncio.timeout(self._deadline_s):
                response: scheduler_pb2.PlaceResponse = await answer
        except TimeoutError:
            self._fall_back(f"the scheduler did not answer within {self._deadline_s:g} s")
            return None
        except PeerUnavailable as error:
            self._fall_back(str(error))
            return None
        finally:
            del self._waiting[request.request_id]
        if response.outcome == scheduler_pb2.PLACE_OUTCOME_NOT_READY:
            self._fall_back(response.message)
            return None
        self._recover()
        return response

    def _send(self, place: scheduler_pb2.PlaceRequest | None) -> None:
        """A placement to ask for, and what has ended. Raises PeerUnavailable only for the former."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        ended, self._ended = self._ended, []
        try:
            assert self._stream is not None
            self._stream.send(scheduler_pb2.SchedulerMessage(place=place, ended=ended))
        except PeerUnavailable as error:
            log.warning("the scheduler was not told of requests' ends", extra={"lost": len(ended), "error": str(error)})
            if place is not None:
                raise

    def _place_here(self, request: scheduler_pb2.PlaceRequest) -> Placement:
        candidates = [one for one in self._candidates(request.model) if one not in request.excluded_instance_ids]
        if not candidates:
            raise NoInstance(f"no instance of {request.model} is connected to this frontend")
        self._metrics.fallback_placements.inc()
        turn = self._turns[request.model]
        self._turns[request.model] += 1
        return Placement(candidates[turn % len(candidates)], FALLBACK_POLICY)

    def _fall_back(self, reason: str) -> None:
        if not self.fallback:
            log.error("placing requests by the fallback", extra={"policy": FALLBACK_POLICY, "reason": reason})
        self.fallback = FALLBACK_POLICY
        self._metrics.fallback_in_force.set(1)

    def _recover(self) -> None:
        if self.fallback:
            log.info("the scheduler can be asked again")
            self.fallback = ""
            self._metrics.fallback_in_force.set(0)

    def _choose_scheduler(self) -> None:
        if self._member is not None and self._schedulers.get(self._member.member_id) == self._member:
            return
        if not self._schedulers:
            return  # a scheduler whose lease ran out may still answer: keep to the last one
        self._member = self._schedulers[min(self._schedulers)]
        if self._task is not None:
            self._task.cancel()
        log.info("using scheduler", extra={"member_id": self._member.member_id, "address": self._member.address})
        self._stream = PeerStream(
            f"scheduler {self._member.member_id}",
            self._member.address,
            lambda channel: scheduler_pb2_grpc.SchedulerStub(channel).PlaceStream,  # type: ignore[no-untyped-call]
            StreamHandlers(self._recover, self._answered, self._lost),
        )
        self._task = self._tasks.spawn(self._stream.run(), name=self._member.member_id, on_error=self._on_failed)

    def _answered(self, response: scheduler_pb2.PlaceResponse) -> None:
        waiting = self._waiting.get(response.request_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(response)

    def _lost(self, reason: str) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(PeerUnavailable(f"the stream to the scheduler ended: {reason}"))
