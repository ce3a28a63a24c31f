"""Ask the workers of a model for the lengths of their requests."""

import asyncio
import logging
from collections.abc import Sequence

import grpc

from controlplane.planner.stages.making import LengthStatistics
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import stages_pb2, stages_pb2_grpc

log = logging.getLogger(__name__)

DEADLINE_S = 3.0


async def collect(transport: Transport, workers: Sequence[Member]) -> LengthStatistics:
    """All that answer in time; one that does not is logged and left out."""
    answers = [
        answer
        for answer in await asyncio.gather(*(_ask(transport, worker) for worker in workers))
        if answer is not None
    ]
    speeds = [answer.transfer_tokens_s for answer in answers if answer.transfer_tokens_s > 0]
    return LengthStatistics(
        lengths=tuple(
            (inputs, outputs)
            for answer in answers
            for inputs, outputs in zip(answer.input_tokens, answer.output_tokens, strict=False)
        ),
        in_flight=sum(answer.in_flight for answer in answers),
        transfer_tokens_s=sum(speeds) / len(speeds) if speeds else 0.0,
    )


async def _ask(transport: Transport, worker: Member) -> stages_pb2.GetLengthsResponse | None:
    async with open_channel(transport, worker.address, worker.role) as channel:
        stub = stages_pb2_grpc.StagesStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer: stages_pb2.GetLengthsResponse = await stub.GetLengths(
                stages_pb2.GetLengthsRequest(), timeout=DEADLINE_S
            )
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, f"worker {worker.member_id} at {worker.address}"))
            log.warning("a worker does not tell its lengths", extra={"reason": reason})
            return None
        return answer
