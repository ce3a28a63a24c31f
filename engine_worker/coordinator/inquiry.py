"""Asks the scheduler who decodes a request whose prompt was computed here."""

import asyncio
import logging

import grpc

from controlplane.model.instance import InstanceDescription
from controlplane.model.request import EngineRequest
from mesh.errors import PeerUnavailable, RpcError
from mesh.leadership_state import Fence
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S = 0.5
"""The request is decoded here meanwhile, and for good if no answer comes."""
MOST_ASKED = 3
"""Schedulers, for one request."""


class DecodeInquiry:
    """One connection, to the scheduler that answered last; where it does not, another one is asked."""

    def __init__(self, directory: Directory, transport: Transport, fence: Fence) -> None:
        """`fence` knows the leaders whose word counts."""
        self._fence = fence
        self._transport = transport
        self._directory = directory
        self._member: Member | None = None
        self._channel: grpc.aio.Channel | None = None

    async def ask(self, request: EngineRequest, instance: InstanceDescription) -> str:
        """The instance to decode it; empty: it stays. Raises `RpcError`, and `StaleLeader` for the word of a scheduler
        that leads no more."""
        schedulers = self._directory.members("scheduler")
        if not schedulers:
            raise PeerUnavailable("the mesh has no scheduler now")
        last = next((index for index, each in enumerate(schedulers) if each == self._member), 0)
        left = [*schedulers[last:], *schedulers[:last]]
        for _ in range(MOST_ASKED):
            scheduler = left.pop(0)
            try:
                answer = await self._ask(scheduler, request, instance)
            except RpcError as error:
                if not left:
                    raise
                log.warning("asking another scheduler who decodes", extra={"error": str(error)})
                continue
            if answer.HasField("fencing"):
                self._fence.check(answer.fencing.duty, answer.fencing.epoch, answer.fencing.leader)
            if answer.leader_id in ("", scheduler.member_id):
                return str(answer.instance_id)
            left.sort(key=lambda each: each.member_id != answer.leader_id)
            if not left or left[0].member_id != answer.leader_id:
                break
        raise PeerUnavailable(f"none of the schedulers that were asked could say who decodes {request.request_id}")

    async def _ask(
        self, scheduler: Member, request: EngineRequest, instance: InstanceDescription
    ) -> scheduler_pb2.PlaceDecodeResponse:
        stub = scheduler_pb2_grpc.SchedulerStub(await self._connect(scheduler))  # type: ignore[no-untyped-call]
        message = scheduler_pb2.PlaceDecodeRequest(
            request_id=request.request_id,
            model=instance.model,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            prefill_instance_id=instance.instance_id,
        )
        try:
            answer: scheduler_pb2.PlaceDecodeResponse = await stub.PlaceDecode(message, timeout=DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"scheduler {scheduler.member_id}") from error
        except asyncio.CancelledError as error:
            # So ends a call whose channel is closed, too: by another request that asks the next scheduler already.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PeerUnavailable(f"scheduler {scheduler.member_id} left before it answered") from error
        return answer

    async def close(self) -> None:
        """Ask nothing any more."""
        if self._channel is not None:
            await self._channel.close()

    async def _connect(self, scheduler: Member) -> grpc.aio.Channel:
        if self._channel is None or scheduler != self._member:
            former, self._member, self._channel = (
                self._channel,
                scheduler,
                open_channel(self._transport, scheduler.address),
            )
            if former is not None:
                await former.close()
        return self._channel
