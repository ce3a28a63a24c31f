"""Asks the scheduler who decodes a request whose prompt was computed here."""

import asyncio
import logging

import grpc

from controlplane.model.instance import InstanceDescription
from controlplane.model.request import EngineRequest
from controlplane.protocols.decode_inquiry import Answered, Ask, Begun, DecodeInquiry, Event, GiveUp, Missed, Stale, Use
from controlplane.protocols.migration.source_events import DecodeChosen
from mesh.errors import PeerUnavailable, RpcError, StaleLeader
from mesh.leadership_state import Fence
from mesh.membership import Directory, Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import scheduler_pb2, scheduler_pb2_grpc

log = logging.getLogger(__name__)


class DecodeInquirer:
    """A connection to each scheduler that was asked. `DecodeInquiry` says who is asked."""

    def __init__(self, directory: Directory, transport: Transport, fence: Fence) -> None:
        """`fence` knows the leaders whose word counts."""
        self._fence = fence
        self._transport = transport
        self._directory = directory
        self._last: Member | None = None
        """Whom the request before this one asked last."""
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        """By the incarnation and the address of the scheduler."""

    async def ask(self, request: EngineRequest, instance: InstanceDescription) -> DecodeChosen:
        """The instance to decode it, or why nobody said one."""
        schedulers = {member.member_id: member for member in self._directory.members("scheduler")}
        connected = next((name for name, member in schedulers.items() if member == self._last), "")
        inquiry = DecodeInquiry(request.request_id)
        event: Event = Begun(tuple(schedulers), connected)
        while True:
            (instruction,) = inquiry.handle(event)
            match instruction:
                case Ask(scheduler_id, deadline_s):
                    event = await self._ask(schedulers[scheduler_id], request, instance, deadline_s)
                case Use(instance_id):
                    return DecodeChosen(request.request_id, instance_id)
                case GiveUp(reason):
                    return DecodeChosen(request.request_id, "", reason)

    async def _ask(
        self, scheduler: Member, request: EngineRequest, instance: InstanceDescription, deadline_s: float
    ) -> Event:
        try:
            answer = await self._place_decode(scheduler, request, instance, deadline_s)
            if answer.HasField("fencing"):
                self._fence.check(answer.fencing.duty, answer.fencing.epoch, answer.fencing.leader)
        except StaleLeader as error:
            return Stale(str(error))
        except RpcError as error:
            log.warning("a scheduler does not say who decodes", extra={"error": str(error)})
            return Missed(str(error))
        return Answered(answer.instance_id, answer.leader_id)

    async def _place_decode(
        self, scheduler: Member, request: EngineRequest, instance: InstanceDescription, deadline_s: float
    ) -> scheduler_pb2.PlaceDecodeResponse:
        await self._close_former()
        message = scheduler_pb2.PlaceDecodeRequest(
            request_id=request.request_id,
            model=instance.model,
            prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
            prefill_instance_id=instance.instance_id,
            adapter_digest=request.adapter_digest,
        )
        # Nothing is awaited from here to the call: other requests ask as well, and may close what has gone meanwhile.
        stub = scheduler_pb2_grpc.SchedulerStub(self._channel(scheduler))  # type: ignore[no-untyped-call]
        try:
            answer: scheduler_pb2.PlaceDecodeResponse = await stub.PlaceDecode(message, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, f"scheduler {scheduler.member_id}") from error
        except asyncio.CancelledError as error:
            # So ends a call whose channel is closed, too: by another request that has seen the scheduler go.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise PeerUnavailable(f"scheduler {scheduler.member_id} left before it answered") from error
        return answer

    async def close(self) -> None:
        """Ask nothing any more."""
        while self._channels:
            await self._channels.popitem()[1].close()

    def _channel(self, scheduler: Member) -> grpc.aio.Channel:
        self._last = scheduler
        if _key(scheduler) not in self._channels:
            channel = open_channel(self._transport, scheduler.address, scheduler.role)
            self._channels[_key(scheduler)] = channel
        return self._channels[_key(scheduler)]

    async def _close_former(self) -> None:
        """Connections to schedulers that are not in the mesh any more, or not as they were."""
        present = {_key(member) for member in self._directory.members("scheduler")}
        for channel in [self._channels.pop(key) for key in list(self._channels) if key not in present]:
            await channel.close()


def _key(scheduler: Member) -> tuple[str, str]:
    return scheduler.incarnation_id, scheduler.address
