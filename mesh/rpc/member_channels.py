"""Channels to members that are called again and again."""

import asyncio
from typing import Final

import grpc

from mesh.membership import Member
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.tasks import TaskSet

CLOSE_GRACE_S: Final = 2.0
"""What calls in progress are given when their channel is closed."""


class MemberChannels:
    """One channel to each member, opened when it is first asked for; its owner closes it when the member has left or
    moved."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        """By role and member id."""
        self._tasks = TaskSet("member channels")

    def to(self, member: Member) -> grpc.aio.Channel:
        """The channel to a member, at the address that it had when the channel was opened."""
        key = (member.role, member.member_id)
        if key not in self._channels:
            self._channels[key] = open_channel(self._transport, member.address, member.role)
        return self._channels[key]

    def close(self, member: Member) -> None:
        """Close the channel to a member; the next one asked for is another."""
        channel = self._channels.pop((member.role, member.member_id), None)
        if channel is not None:
            self._tasks.spawn(channel.close(CLOSE_GRACE_S), name=f"close the channel to {member.member_id}")

    async def stop(self) -> None:
        """Close every channel."""
        await self._tasks.cancel()
        channels, self._channels = list(self._channels.values()), {}
        await asyncio.gather(*(channel.close() for channel in channels))
