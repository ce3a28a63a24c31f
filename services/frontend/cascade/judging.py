"""Asks the cascade router for a score."""

import asyncio
import logging
from dataclasses import dataclass
from itertools import count
from typing import Final

import grpc
from prometheus_client import Counter

from controlplane.protocols.cascade.no_score import NO_SCORE
from mesh.errors import JudgeUnavailable
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import cascade_pb2, cascade_pb2_grpc

log = logging.getLogger(__name__)

CASCADE_ROLE: Final = "cascade"
MAX_UNHEARD: Final = 256
"""Judgements under way that nobody waits for: they only count and sample."""

_ANOTHER_MAY: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        # It does not know the cascade yet.
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.FAILED_PRECONDITION,
    }
)
_HAS_COUNTED: Final = frozenset({grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED})
"""A router that says so has counted the request, although it did not judge it."""


@dataclass(frozen=True, slots=True)
class Score:
    """A judge's verdict on one answer: 0 to 100, and the judge's name."""

    score: float
    judge: str


class JudgeClient:
    """Calls the routers of the mesh in turn."""

    def __init__(self, deadline_s: float, transport: Transport, untold: Counter) -> None:
        """`untold` counts, by cascade, the requests that no router has counted."""
        self._deadline_s = deadline_s
        self._transport = transport
        self._untold = untold
        self._members: dict[str, Member] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turns = count()
        self._tasks = TaskSet("judging")

    def on_change(self, change: MemberChange) -> None:
        """Call the routers that the directory announces, and no longer those that have left."""
        member = change.member
        if member.role != CASCADE_ROLE:
            return
        if change.kind is not ChangeKind.LEFT:
            self._close(member.member_id)
            self._members[member.member_id] = member
        elif self._members.get(member.member_id) == member:
            del self._members[member.member_id]
            self._close(member.member_id)

    async def judge(self, request: cascade_pb2.JudgeRequest, left_s: float | None) -> Score:
        """Within `left_s`, if it is given, or the client's own deadline; by the next router where one cannot be
        reached or does not take it. Raises `JudgeUnavailable`."""
        clock = asyncio.get_running_loop().time
        ends_s = clock() + (self._deadline_s if left_s is None else min(left_s, self._deadline_s))
        failures: list[str] = []
        for member in self._in_turn():
            if self._members.get(member.member_id) != member:
                continue
            stub = cascade_pb2_grpc.CascadeStub(self._channel(member))  # type: ignore[no-untyped-call]
            try:
                answer = await stub.Judge(request, timeout=max(0.001, ends_s - clock()))
            except grpc.aio.AioRpcError as error:
                failures.append(f"{member.member_id}: {error.code().name}: {error.details()}")
                if error.code() in _HAS_COUNTED or _has_no_score(error):
                    request.first_answer = False
                if clock() >= ends_s or not _may_another_judge(error):
                    break
            else:
                return Score(answer.score, answer.judge)
        self._count_untold(request)
        raise JudgeUnavailable("; ".join(failures) or "no cascade router is running")

    def tell(self, request: cascade_pb2.JudgeRequest) -> None:
        """Have an answer judged, or a request counted, whose score nobody waits for, unless too many are."""
        if len(self._tasks) < MAX_UNHEARD:
            self._tasks.spawn(self._judge_unheard(request), name=f"tell the judge of {request.request_id}")
        else:
            self._count_untold(request)

    async def _judge_unheard(self, request: cascade_pb2.JudgeRequest) -> None:
        try:
            await self.judge(request, None)
        except JudgeUnavailable as error:
            log.info("no router was told", extra={"request_id": request.request_id, "error": str(error)})

    async def stop(self) -> None:
        """Give up all judgements under way and close every connection."""
        await self._tasks.cancel()
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    def _count_untold(self, request: cascade_pb2.JudgeRequest) -> None:
        if request.first_answer:
            self._untold.labels(request.cascade).inc()

    def _in_turn(self) -> list[Member]:
        """All routers, another one first each time."""
        members = list(self._members.values())
        first = next(self._turns) % max(1, len(members))
        return members[first:] + members[:first]

    def _channel(self, member: Member) -> grpc.aio.Channel:
        channel = self._channels.get(member.member_id)
        if channel is None:
            channel = open_channel(self._transport, member.address, member.role)
            self._channels[member.member_id] = channel
        return channel

    def _close(self, member_id: str) -> None:
        channel = self._channels.pop(member_id, None)
        if channel is not None:
            # What is being judged there is let finish; closed at once, a channel cancels whoever waits on it.
            self._tasks.spawn(channel.close(self._deadline_s), name=f"close the channel to {member_id}")


def _may_another_judge(error: grpc.aio.AioRpcError) -> bool:
    """Not where the judges themselves gave no score: they are the same for all routers."""
    return error.code() in _ANOTHER_MAY and not _has_no_score(error)


def _has_no_score(error: grpc.aio.AioRpcError) -> bool:
    return NO_SCORE in map(tuple, error.trailing_metadata() or ())
