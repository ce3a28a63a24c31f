"""The speaking ends: one stream to each worker that this one has something to say to."""

import asyncio
import logging
from collections.abc import Callable
from typing import TypeAlias

import grpc

from engine_worker.coordinator.stages import wire
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.rpc.outbox import LossyOutbox
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import stages_pb2, stages_pb2_grpc

log = logging.getLogger(__name__)

MAX_UNSENT_MESSAGES = 1024
_Outbox: TypeAlias = LossyOutbox[stages_pb2.StageMessage]


class StageLinks:
    """Opens a stream when there is something to say, and tells when one has ended. Messages may get lost with it."""

    def __init__(
        self,
        instance_id: str,
        incarnation_id: str,
        peers: Callable[[], tuple[Member, ...]],
        lost: Callable[[str], None],
        transport: Transport,
    ) -> None:
        """`peers` are the workers that may be spoken to; `lost` hears the id of one whose stream has ended."""
        self._instance_id = instance_id
        self._incarnation_id = incarnation_id
        self._peers = peers
        self._lost = lost
        self._transport = transport
        self._outboxes: dict[tuple[str, str], _Outbox] = {}
        """By instance and incarnation."""
        self._tasks = TaskSet("stage links")

    def send(self, instance_id: str, message: stages_pb2.StageMessage) -> None:
        """Queue a message; one for a worker that is not here is dropped, as the protocol allows."""
        peer = next((member for member in self._peers() if member.member_id == instance_id), None)
        if peer is None:
            return
        key = (peer.member_id, peer.incarnation_id)
        outbox = self._outboxes.get(key)
        if outbox is None:
            outbox = self._outboxes[key] = _Outbox(f"worker {instance_id}", MAX_UNSENT_MESSAGES)
            outbox.put(wire.hello(self._instance_id, self._incarnation_id, peer.incarnation_id))
            self._tasks.spawn(self._run(peer, outbox), name=peer.member_id)
        outbox.put(message)

    async def stop(self) -> None:
        """End all streams."""
        await self._tasks.cancel()

    async def _run(self, peer: Member, outbox: _Outbox) -> None:
        name = f"worker {peer.member_id} at {peer.address}"
        reason = "it ended the stream"
        try:
            async with open_channel(self._transport, peer.address, peer.role) as channel:
                stub = stages_pb2_grpc.StagesStub(channel)  # type: ignore[no-untyped-call]
                call = stub.Tell()
                ended = asyncio.ensure_future(call.code())
                writer = asyncio.create_task(_write(call, outbox))
                try:
                    await asyncio.wait((ended, writer), return_when=asyncio.FIRST_COMPLETED)
                    await call  # raises what ended it
                finally:
                    call.cancel()
                    for task in (writer, ended):
                        task.cancel()
                    await asyncio.gather(writer, ended, return_exceptions=True)
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, name))
        finally:
            del self._outboxes[peer.member_id, peer.incarnation_id]
        log.info("a stage stream ended", extra={"instance_id": peer.member_id, "reason": reason})
        self._lost(peer.member_id)


async def _write(call: grpc.aio.StreamUnaryCall, outbox: _Outbox) -> None:
    async for message in outbox:
        await call.write(message)
