"""The listening end of what workers tell each other, and the lengths for the planner."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn

import grpc

from controlplane.policies.stages.neighbours import StageReport
from controlplane.protocols.bid_ask.messages import Message
from engine_worker.coordinator.stages import wire
from engine_worker.coordinator.stages.ended_lengths import EndedLengths
from mesh.errors import ProtocolViolation
from penstock.v1 import stages_pb2, stages_pb2_grpc

HELLO_TIMEOUT_S = 5.0

Heard = Callable[[str, Message | StageReport], None]


class StagesService(stages_pb2_grpc.StagesServicer):
    """penstock.v1.Stages."""

    def __init__(
        self, incarnation_id: str, heard: Heard, lengths: EndedLengths, transfer_tokens_s: Callable[[], float]
    ) -> None:
        self._incarnation_id = incarnation_id
        self._heard = heard
        self._lengths = lengths
        self._transfer_tokens_s = transfer_tokens_s

    async def Tell(self, request_iterator: AsyncIterator[stages_pb2.StageMessage], context: Any) -> stages_pb2.TellEnd:
        """Take in what another worker says until it ends."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                speaker = await self._read_hello(request_iterator)
            async for message in request_iterator:
                self._heard(speaker, wire.to_message(message))
        except TimeoutError:
            await _abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came; send StageHello first")
        except ProtocolViolation as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return stages_pb2.TellEnd()

    async def GetLengths(self, request: stages_pb2.GetLengthsRequest, context: Any) -> stages_pb2.GetLengthsResponse:
        """What a plan is made from."""
        lengths = self._lengths
        return stages_pb2.GetLengthsResponse(
            input_tokens=[inputs for inputs, _ in lengths.lengths],
            output_tokens=[outputs for _, outputs in lengths.lengths],
            ended_total=lengths.ended_total,
            in_flight=lengths.in_flight,
            transfer_tokens_s=self._transfer_tokens_s(),
        )

    async def _read_hello(self, inbound: AsyncIterator[stages_pb2.StageMessage]) -> str:
        async for message in inbound:
            if not message.HasField("hello") or not message.hello.instance_id:
                raise ProtocolViolation("the first message must be a StageHello with an instance_id")
            if message.hello.listener_incarnation_id != self._incarnation_id:
                raise ProtocolViolation(
                    f"incarnation {message.hello.listener_incarnation_id} was spoken to, this is {self._incarnation_id}"
                )
            speaker: str = message.hello.instance_id
            return speaker
        raise ProtocolViolation("the stream ended before its hello")


async def _abort(context: Any, code: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(code, message)
    raise AssertionError("abort returned")
