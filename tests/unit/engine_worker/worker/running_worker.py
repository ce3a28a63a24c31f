"""A worker's instance and service on loopback, driven by a fake engine and a clock that the test turns."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry

from controlplane.model.instance import InstanceDescription
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.service import WorkerService
from engine_worker.settings import WorkerSettings
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemThreads
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from tests.unit.engine_worker.worker.fake_engine import LIMITS, FakeEngine

DESCRIPTION = InstanceDescription(
    instance_id="worker-0",
    incarnation_id="0badcafe",
    address="127.0.0.1:1",
    model="m",
    model_path="/models/m",
    engine="simulated",
    block_tokens=LIMITS.block_tokens,
    kv_blocks=LIMITS.kv_blocks,
    max_model_len_tokens=LIMITS.max_model_len_tokens,
    max_batch_requests=LIMITS.max_batch_requests,
    max_step_tokens=LIMITS.max_step_tokens,
)
SETTINGS = WorkerSettings(model="m", model_path="/models/m", engine="simulated", max_requests=8, max_streams=3)
WAIT_S = 5.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FrontendStream:
    """The frontend's end of one stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def hello(self, frontend_id: str = "frontend-0") -> Any:
        await self.call.write(worker_pb2.FrontendMessage(hello=worker_pb2.FrontendHello(frontend_id=frontend_id)))
        return (await self.read()).hello

    async def generate(self, request_id: str, **fields: Any) -> None:
        sampling = request_pb2.SamplingParams(max_tokens=100, top_p=1.0, repetition_penalty=1.0)
        defaults = {"prompt_token_ids": [1, 2, 3], "model": "m", "sampling": sampling}
        request = request_pb2.GenerateRequest(request_id=request_id, **{**defaults, **fields})
        await self.call.write(worker_pb2.FrontendMessage(generate=request))

    async def abort(self, request_id: str) -> None:
        await self.call.write(worker_pb2.FrontendMessage(abort=worker_pb2.AbortRequest(request_id=request_id)))

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF."""
        async with asyncio.timeout(WAIT_S):
            return await self.call.read()

    async def deltas(self) -> dict[str, request_pb2.TokenDelta]:
        """The next step, by request."""
        step = (await self.read()).step
        assert len({delta.request_id for delta in step.deltas}) == len(step.deltas)
        return {delta.request_id: delta for delta in step.deltas}

    async def only_delta(self) -> request_pb2.TokenDelta:
        """The next step's only delta."""
        (delta,) = (await self.deltas()).values()
        return delta


class RunningWorker:
    """What `running_worker` gives."""

    def __init__(self, engine: FakeEngine, instance: Instance, stub: Any, clock: Clock, output: Any) -> None:
        self.engine = engine
        self.instance = instance
        self.stub = stub
        self.clock = clock
        self.output: asyncio.Task[None] = output

    async def connect(self, frontend_id: str = "frontend-0") -> FrontendStream:
        """A stream after its hello."""
        stream = FrontendStream(self.stub.Stream())
        await stream.hello(frontend_id)
        return stream

    async def until(self, condition: Any) -> None:
        """Return once `condition()` holds; what crosses the loopback takes a moment."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110  the other end of a socket sets no event here
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running_worker(
    settings: WorkerSettings = SETTINGS, registry: CollectorRegistry | None = None
) -> AsyncIterator[RunningWorker]:
    """A worker that has started."""
    engine, clock = FakeEngine(), Clock()
    metrics = WorkerMetrics(registry or CollectorRegistry())
    instance = Instance(engine, DESCRIPTION, settings, metrics, clock)
    server = RpcServer(GrpcTransport())
    service = WorkerService(instance, clock, SystemThreads())
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, "penstock.v1.Worker")
    output = asyncio.create_task(instance.run())
    address = await server.start()
    async with open_channel(GrpcTransport(), address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        yield RunningWorker(engine, instance, stub, clock, output)
    output.cancel()
    await asyncio.gather(output, return_exceptions=True)
    await server.stop(0.1)
