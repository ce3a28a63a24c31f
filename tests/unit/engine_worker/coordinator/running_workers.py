"""Several whole workers with simulated engines on loopback, and a frontend that follows requests as they move."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.role import WorkerRole
from engine_worker.settings import PhaseName, WorkerSettings
from mesh.announcement import Announcement
from mesh.membership import FOLLOWED_AT_START, Directory, Member
from mesh.role import RoleContext
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, SystemClock, SystemEntropy, system_runtime
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.tracing import NO_TRACES, Tracer
from penstock.v1 import request_pb2, worker_pb2, worker_pb2_grpc
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.instance.instance import SimulatedInstance
from tests.in_time import still

WAIT_S = 60.0
MODEL = "m"
FRONTEND = "frontend-0"
STEP_MS = 4.0


@dataclass
class Heard:
    """What a frontend knows of one request."""

    epoch: int = 0
    owner: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: int = 0
    error: request_pb2.RequestError | None = None
    moved_to: list[str] = field(default_factory=list)
    cached_tokens: int | None = None

    def take(self, instance_id: str, delta: request_pb2.TokenDelta) -> None:
        """Tokens of the highest epoch only; those that are missing before them come with the first delta."""
        if delta.epoch < self.epoch:
            return
        if delta.epoch > self.epoch and delta.emitted_token_ids:
            assert list(delta.emitted_token_ids)[: len(self.token_ids)] == self.token_ids
            self.token_ids = list(delta.emitted_token_ids)
        self.epoch, self.owner = delta.epoch, instance_id
        assert not self.finish_reason, "nothing follows the end"
        if delta.HasField("cached_tokens"):
            self.cached_tokens = delta.cached_tokens
        self.finish_reason = delta.finish_reason
        if delta.HasField("error"):
            self.error = delta.error
            return  # what its former owner said last may still be on its way
        assert delta.offset == len(self.token_ids), "no token is lost or doubled"
        self.token_ids += delta.token_ids


class Worker:
    """One worker and the frontend's stream to it."""

    def __init__(self, role: WorkerRole, context: RoleContext, announcement: Announcement) -> None:
        self.role = role
        self.context = context
        self.announcement = announcement
        self.channel = open_channel(GrpcTransport(), context.address)
        self.stub: Any = worker_pb2_grpc.WorkerStub(self.channel)  # type: ignore[no-untyped-call]
        self.call: Any = None

    @property
    def instance(self) -> Any:
        return self.role._instance

    @property
    def engine(self) -> Any:
        return self.role._engine

    @property
    def name(self) -> str:
        return self.context.member_id

    def metric(self, name: str, **labels: str) -> float:
        return self.context.registry.get_sample_value(name, labels) or 0.0


class Workers:
    """All workers and the frontend."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.heard: dict[str, Heard] = {}
        self.readers: list[asyncio.Task[None]] = []
        self.wait_s = WAIT_S
        self._news = asyncio.Event()

    async def connect(self, worker: Worker) -> None:
        worker.call = worker.stub.Stream()
        hello = worker_pb2.FrontendHello(frontend_id=FRONTEND)
        await worker.call.write(worker_pb2.FrontendMessage(hello=hello))
        assert (await worker.call.read()).HasField("hello")
        self.readers.append(asyncio.create_task(self._read(worker)))

    async def generate(
        self,
        name: str,
        request: EngineRequest,
        decode: str = "",
        is_decode_open: bool = False,
        prefix: tuple[str, int] | None = None,
    ) -> Heard:
        """`prefix`: whose cached prefix it is to begin with, and how many tokens."""
        sampling = request_pb2.SamplingParams(
            max_tokens=request.sampling.max_tokens, top_p=1, repetition_penalty=1, ignore_eos=True
        )
        message = request_pb2.GenerateRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            model=MODEL,
            sampling=sampling,
            traceparent=request.traceparent,
            cache_salt=request.cache_salt,
        )
        if prefix is not None:
            message.prefix.instance_id, message.prefix.tokens = prefix
        message.decode_instance_id = decode
        message.is_decode_open = is_decode_open
        heard = self.heard[request.request_id] = Heard(owner=name)
        await self.workers[name].call.write(worker_pb2.FrontendMessage(generate=message))
        return heard

    async def migrate(self, source: str, request_id: str, target: str, **fields: Any) -> worker_pb2.MigrateResponse:
        message = worker_pb2.MigrateRequest(request_id=request_id, target_instance_id=target, **fields)
        answer: worker_pb2.MigrateResponse = await self.workers[source].stub.Migrate(message, timeout=WAIT_S)
        if (heard := self.heard.get(request_id)) is not None and not heard.moved_to:
            still("does not run here" not in answer.reason, f"{request_id} runs when it is to be moved")
        return answer

    async def abort(self, name: str, request_id: str) -> None:
        abort = worker_pb2.AbortRequest(request_id=request_id)
        await self.workers[name].call.write(worker_pb2.FrontendMessage(abort=abort))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition()` holds; looked at whenever a message came."""
        async with asyncio.timeout(self.wait_s):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_tokens(self, request_id: str, count: int) -> None:
        await self.until(lambda: len(self.heard[request_id].token_ids) >= count)

    async def until_ended(self, *request_ids: str) -> None:
        await self.until(lambda: all(self.heard[each].finish_reason for each in request_ids))

    async def _read(self, worker: Worker) -> None:
        try:
            while (message := await worker.call.read()) is not grpc.aio.EOF:
                if message.HasField("moved"):
                    self.heard[message.moved.request_id].moved_to.append(message.moved.instance_id)
                for delta in message.step.deltas:
                    self.heard[delta.request_id].take(worker.name, delta)
                self._news.set()
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                raise
        finally:
            self._news.set()


def make_request(request_id: str, prompt: int = 40, max_tokens: int = 120, salt: int = 0) -> EngineRequest:
    prompt_token_ids = tuple(3 + (salt * 7919 + 31 * index) % 30_000 for index in range(prompt))
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return EngineRequest(request_id, prompt_token_ids, sampling)


def undisturbed(request: EngineRequest) -> list[int]:
    """What the request says when it stays where it is."""
    instance = SimulatedInstance(InstanceConfig(), LinearCost())
    instance.submit(request)
    said: list[int] = []
    while (step := instance.plan_step(0.0)) is not None:
        said += [token for delta in instance.finish_step(step).deltas for token in delta.token_ids]
    return said


@asynccontextmanager
async def running_workers(
    *names: str,
    options: tuple[str, ...] = (),
    settings: WorkerSettings | None = None,
    phases: Mapping[str, PhaseName] = MappingProxyType({}),
    more_options: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    tracer: Tracer = NO_TRACES,
) -> AsyncIterator[Workers]:
    """Workers that know each other, with a frontend connected to all of them. Their engines are simulated, with these
    options, unless there are settings. `phases` by name; any phase for the others. `more_options`: of a worker
    besides."""
    host, workers = StoreHost(SystemClock(), SystemEntropy()), Workers()
    if settings is None:
        engine_arg = (f"cost.fixed_ms={STEP_MS}", *options)
        settings = WorkerSettings(model=MODEL, model_path="/none", engine="simulated", engine_arg=engine_arg)
    async with AsyncExitStack() as stack:
        stack.callback(host.close)
        for number, name in enumerate(names):
            engine_arg = settings.engine_arg + more_options.get(name, ())
            own = replace(settings, phase=phases.get(name, "any"), engine_arg=engine_arg)
            await stack.enter_async_context(_worker(workers, host, own, name, f"{number:08x}", tracer))
        everybody = Directory(EmbeddedStore(host))
        await everybody.start()
        stack.push_async_callback(everybody.stop)
        await everybody.wait_for("worker", len(names), WAIT_S)
        for worker in workers.workers.values():
            await workers.connect(worker)
        try:
            yield workers
        finally:
            for reader in workers.readers:
                reader.cancel()
            outcomes = await asyncio.gather(*workers.readers, return_exceptions=True)
        assert not [each for each in outcomes if isinstance(each, Exception)]


@asynccontextmanager
async def _worker(
    workers: Workers, host: StoreHost, settings: WorkerSettings, name: str, incarnation_id: str, tracer: Tracer
) -> AsyncIterator[None]:
    store, server = EmbeddedStore(host), RpcServer(GrpcTransport())
    directory = Directory(store, FOLLOWED_AT_START["worker"])
    await directory.start()
    context = RoleContext(
        "worker", name, incarnation_id, server.address, store, directory, server, CollectorRegistry(), system_runtime()
    )
    context = replace(context, tracer=tracer)
    role = WorkerRole(settings)
    attributes = await role.start(context)
    await server.start()
    announcement = Announcement(store, Member("worker", name, incarnation_id, server.address, "", attributes))
    await announcement.start()
    worker = workers.workers[name] = Worker(role, context, announcement)
    try:
        yield
    finally:
        await worker.channel.close()
        await announcement.withdraw()
        await role.stop()
        await directory.stop()
        await server.stop(0.1)
