"""The other frontends of the mesh, and channels to them."""

from collections.abc import Callable
from typing import Final

from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.member_channels import MemberChannels
from mesh.runtime import Transport
from penstock.v1 import frontend_pb2_grpc

FRONTEND_ROLE: Final = "frontend"
PEER_DEADLINE_S: Final = 2.0


class FrontendPeers:
    """Those that the directory knows, without this one."""

    def __init__(self, own_id: str, transport: Transport) -> None:
        self.on_joined: list[Callable[[Member], None]] = []
        self.on_left: list[Callable[[Member], None]] = []
        """Another incarnation of a frontend is another frontend."""
        self._own_id = own_id
        self._members: dict[str, Member] = {}
        self._channels = MemberChannels(transport)

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
        self._channels.close(member)
        if known is not None and not is_known:
            self._forget(member.member_id)
        self._members[member.member_id] = member
        if not is_known:
            for follower in self.on_joined:
                follower(member)

    def members(self) -> list[Member]:
        """In the order in which they came."""
        return list(self._members.values())

    def stub(self, member: Member) -> frontend_pb2_grpc.FrontendStub:
        """To call it by."""
        return frontend_pb2_grpc.FrontendStub(self._channels.to(member))  # type: ignore[no-untyped-call]

    async def stop(self) -> None:
        """Close every connection."""
        await self._channels.stop()

    def _forget(self, member_id: str) -> None:
        member = self._members.pop(member_id)
        self._channels.close(member)
        for follower in self.on_left:
            follower(member)
