"""Frontends tell each other what they have let in with each key, so that a key has its limits once.

Asking the others before each request would cost every client a round trip, and let a frontend that hangs hold up all;
a part of each limit for each frontend would give a client that stays at one of them that part alone. So each tells,
some times a second, what has changed, as totals: what was lost or came twice does no harm.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import grpc

from mesh.errors import PeerUnavailable
from mesh.membership import Member
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2
from services.frontend.requests.frontend_peers import PEER_DEADLINE_S, FrontendPeers
from services.frontend.requests.key_limits import KeyLimits, KeyUse

log = logging.getLogger(__name__)

TELL_S: Final = 0.2
RETOLD_ROUNDS: Final = 300
"""A frontend of an earlier release, which has no such call, is told again after so many times `TELL_S`: a minute."""
MAX_KEYS_TOLD: Final = 1024
"""In one message, some 64 KiB."""


class SharedLimits:
    """The limits of this frontend's keys, with what others have let in."""

    def __init__(self, limits: KeyLimits, own_incarnation_id: str, peers: FrontendPeers) -> None:
        self.limits = limits
        self._own_incarnation_id = own_incarnation_id
        self._peers = peers
        peers.on_joined.append(lambda member: limits.frontend_joined(member.incarnation_id))
        peers.on_left.append(lambda member: limits.frontend_left(member.incarnation_id))
        self._telling: set[str] = set()
        """Incarnations that have not answered yet: one call to each at a time."""
        self._silent: set[str] = set()
        """Likewise those that did not take the last: it is logged once."""
        self._deaf: dict[str, tuple[Member, int]] = {}
        """By member id, those of an earlier release, as they were announced, and the round that tells them again."""
        self._round = 0
        self._tasks = TaskSet("key limits")

    def heard(self, request: frontend_pb2.ShareUseRequest, now_s: float) -> None:
        """Another frontend tells. Raises PeerUnavailable for one that the directory has not told of yet, which tells it
        again, and ValueError for a bound that is none."""
        if not self.limits.knows(request.incarnation_id):
            raise PeerUnavailable(f"the frontend {request.incarnation_id} is not known here yet; tell it again")
        self.limits.heard(request.incarnation_id, {each.key: _use(each) for each in request.uses}, now_s)

    async def tell(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Go on telling the others: for ever."""
        while True:
            await sleep(TELL_S)
            self._round += 1
            members = self._peers.members()
            self._deaf = {each.member_id: deaf for each in members if (deaf := self._deaf_as_of_now(each)) is not None}
            for member in members:
                incarnation = member.incarnation_id
                if member.member_id in self._deaf:
                    continue
                if incarnation not in self._telling and self.limits.is_behind(incarnation):
                    self._telling.add(incarnation)
                    self._tasks.spawn(self._tell(member), name=f"tell {member.member_id}")

    def _deaf_as_of_now(self, member: Member) -> tuple[Member, int] | None:
        deaf = self._deaf.get(member.member_id)
        return deaf if deaf is not None and deaf[0] == member and self._round < deaf[1] else None

    async def stop(self) -> None:
        """Give up what is being told."""
        await self._tasks.cancel()

    async def _tell(self, member: Member) -> None:
        incarnation = member.incarnation_id
        uses = self.limits.unsent_for(incarnation, MAX_KEYS_TOLD)
        request = frontend_pb2.ShareUseRequest(incarnation_id=self._own_incarnation_id, uses=_messages(uses.items()))
        try:
            await self._peers.stub(member).ShareUse(request, timeout=PEER_DEADLINE_S)
            self._silent.discard(incarnation)
        except grpc.aio.AioRpcError as error:
            self.limits.not_sent(incarnation, uses)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                self._deaf[member.member_id] = (member, self._round + RETOLD_ROUNDS)
            if incarnation not in self._silent:
                self._silent.add(incarnation)
                log.warning(
                    "a frontend does not hear what keys have taken here, and may let in as much again",
                    extra={"frontend": member.member_id, "error": error.details()},
                )
        finally:
            self._telling.discard(incarnation)
            if not self.limits.knows(incarnation):
                self._silent.discard(incarnation)


def _messages(uses: Iterable[tuple[str, KeyUse]]) -> list[frontend_pb2.KeyUse]:
    return [
        frontend_pb2.KeyUse(
            key=name,
            requests=use.requests,
            tokens=use.tokens,
            running=use.running,
            requests_per_min=use.requests_per_min,
            tokens_per_min=use.tokens_per_min,
            is_base=use.is_base,
        )
        for name, use in uses
    ]


def _use(message: frontend_pb2.KeyUse) -> KeyUse:
    for name in ("requests_per_min", "tokens_per_min"):
        if message.HasField(name) and not 0 < getattr(message, name) < math.inf:
            raise ValueError(f"{name} of {message.key!r} must be a positive number, not {getattr(message, name)}")
    return KeyUse(
        message.requests,
        message.tokens,
        message.running,
        message.requests_per_min if message.HasField("requests_per_min") else None,
        message.tokens_per_min if message.HasField("tokens_per_min") else None,
        message.is_base,
    )
