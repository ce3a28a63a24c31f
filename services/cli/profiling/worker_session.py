"""A profiler's connection to one worker: requests in, tokens and step samples out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from controlplane.model.step_sample import StepSample
from controlplane.planning.cascade.replica import ReplicaShape
from controlplane.planning.instance_profile import InstanceSizes
from mesh.errors import PeerUnavailable, RequestRefused
from mesh.membership import Member
from mesh.rpc.client import open_channel, rpc_error
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from services.cli.connection import AS_OPERATOR

CALL_DEADLINE_S = 5.0
SILENCE_S = 120.0
"""An instance with requests that says nothing for so long is given up."""


class WorkerSession:
    """One stream to a worker; make it with `worker_session`."""

    def __init__(self, stub: Any, call: Any, name: str, description: worker_pb2.DescribeResponse) -> None:
        self.name = name
        self.engine = description.instance.engine
        self.model = description.instance.model
        self.model_path = description.instance.model_path
        self.device = description.device or "unknown"
        instance = description.instance
        self.sizes = InstanceSizes(
            instance.block_tokens,
            instance.kv_blocks,
            instance.max_model_len_tokens,
            instance.max_batch_requests,
            instance.max_step_tokens,
        )
        self.shape = _shape(instance)
        """None where the worker does not say."""
        self._stub = stub
        self._call = call

    async def generate(self, request_id: str, prompt_token_ids: list[int], answer_tokens: int) -> None:
        """Ask for an answer of exactly `answer_tokens` tokens."""
        sampling = request_pb2.SamplingParams(
            max_tokens=answer_tokens, min_tokens=answer_tokens, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
        )
        request = request_pb2.GenerateRequest(
            request_id=request_id, prompt_token_ids=prompt_token_ids, model=self.model, sampling=sampling
        )
        await self._call.write(worker_pb2.FrontendMessage(generate=request))

    async def abort(self, request_id: str) -> None:
        """Take a request back; its last delta still comes."""
        await self._call.write(worker_pb2.FrontendMessage(abort=worker_pb2.AbortRequest(request_id=request_id)))

    async def next_deltas(self) -> list[request_pb2.TokenDelta]:
        """What the next step brought. Raises `PeerUnavailable` for an instance that has gone or is silent, and
        `RequestRefused` for a request that it did not take."""
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await self._call.read()
        except TimeoutError:
            raise PeerUnavailable(f"{self.name} has said nothing for {SILENCE_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.name) from error
        if message is grpc.aio.EOF:
            raise PeerUnavailable(f"{self.name} has ended the stream")
        if message.WhichOneof("message") == "moved":
            raise PeerUnavailable(f"{self.name} has moved a request away: stop rescheduling while you profile")
        deltas = list(message.step.deltas)
        for delta in deltas:
            if delta.finish_reason == request_pb2.FINISH_REASON_ERROR:
                raise RequestRefused(f"{self.name}: request {delta.request_id}: {delta.error.message}")
        return deltas

    async def load(self) -> worker_pb2.LoadReport:
        """The worker's load at this moment. Raises `RpcError`."""
        try:
            answer = await self._stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=CALL_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.name) from error
        load: worker_pb2.LoadReport = answer.load
        return load

    async def steps(self) -> AsyncIterator[StepSample]:
        """Every engine step until the iterator is closed."""
        call = self._stub.WatchSteps(worker_pb2.WatchStepsRequest())
        try:
            async for message in call:
                for step in message.steps:
                    yield StepSample(
                        step.duration_ms,
                        step.prefill_tokens,
                        step.attended_pairs,
                        step.decode_requests,
                        step.context_tokens,
                        step.longest_context_tokens,
                    )
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, self.name) from error
        finally:
            call.cancel()


@asynccontextmanager
async def worker_session(member: Member) -> AsyncIterator[WorkerSession]:
    """Connect to a worker. Raises RpcError."""
    name = f"worker {member.member_id} at {member.address}"
    async with open_channel(AS_OPERATOR, member.address, member.role) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            description = await stub.Describe(worker_pb2.DescribeRequest(), timeout=CALL_DEADLINE_S)
            call = stub.Stream()
            hello = worker_pb2.FrontendHello(frontend_id="profile")
            await call.write(worker_pb2.FrontendMessage(hello=hello))
            async with asyncio.timeout(CALL_DEADLINE_S):
                await call.read()
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, name) from error
        except TimeoutError:
            raise PeerUnavailable(f"{name} does not answer the hello") from None
        try:
            yield WorkerSession(stub, call, name, description)
        finally:
            call.cancel()


def _shape(instance: worker_pb2.InstanceDescription) -> ReplicaShape | None:
    if not instance.tensor_parallel:
        return None
    return ReplicaShape(instance.tensor_parallel, max(1, instance.pipeline_parallel))
