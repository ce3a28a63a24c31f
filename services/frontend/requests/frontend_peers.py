"""The other frontends of the mesh, and channels to them."""

import asyncio
from collections.abc import Callable
from typing import Final

import grpc

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2_grpc

FRONTEND_ROLE: Final = "frontend"
PEER_DEADLINE_S: Final = 2.0


class FrontendPeers:
    """Those that the directory knows, without this one."""

    def __init__(self, own_id: str, transport: Transport) -> None:
        self.on_joined: Callable[[Member], None] = lambda member: None
        self.on_left: Callable[[Member], None] = lambda member: None
        """Another incarnation of a frontend is another frontend."""
        self._own_id = own_id
        self._transport = transport
        self._members: dict[str, Member] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._tasks = TaskSet("frontend peers")

    def on_change(self, change: MemberChange) -> None:
        """Follow the directory; changes of other roles are ignored."""
        member = change.member
        if member.role != FRONTEND_ROLE or member.member_id == self._own_id:
            return
        known = self._members.get(member.member_id)
        is_known = known is not None and known.incarnation_id == member.incarnation_id
        if change.kind is ChangeKind.LEFT:
            if is_known:
                self._forget(member.member_id)
            return
        self._close(member.member_id)
        if known is not None and not is_known:
            self._forget(member.member_id)
        self._members[member.member_id] = member
        if not is_known:
            self.on_joined(member)

    def members(self) -> list[Member]:
        """In the order in which they came."""
        return list(self._members.values())

    def stub(self, member: Member) -> frontend_pb2_grpc.FrontendStub:
        """To call it by."""
        channel = self._channels.get(member.member_id)
        if channel is None:
            channel = open_channel(self._transport, member.address, member.role)
            self._channels[member.member_id] = channel
        return frontend_pb2_grpc.FrontendStub(channel)  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Close every connection."""
        await self._tasks.cancel()
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))

    def _forget(self, member_id: str) -> None:
        self.on_left(self._members.pop(member_id))
        self._close(member_id)

    def _close(self, member_id: str) -> None:
        channel = self._channels.pop(member_id, None)
        if channel is not None:
            self._tasks.spawn(channel.close(PEER_DEADLINE_S), name=f"close the channel to {member_id}")
