"""A worker and a scheduler that speak the real protocol but do as a test says, and a directory of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from controlplane.media_message import expanded_message, prompt_media
from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.protocols.cascade.no_score import NO_SCORE
from mesh.errors import EngineFailed, RequestRefused
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport
from penstock.v1 import (
    cascade_pb2,
    cascade_pb2_grpc,
    request_pb2,
    scheduler_pb2,
    scheduler_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

HEARTBEAT_S = 1.0

Delta = request_pb2.TokenDelta
Script = Callable[[request_pb2.GenerateRequest], Iterable[Delta]]


def tokens(
    *steps: Sequence[int], finish: request_pb2.FinishReason = request_pb2.FINISH_REASON_STOP, cached: int = 0
) -> list[Delta]:
    """A delta for each step, the last of which ends the request."""
    deltas, offset = [], 0
    for step in steps:
        deltas.append(Delta(offset=offset, token_ids=step))
        offset += len(step)
    deltas[0].cached_tokens = cached
    deltas[-1].finish_reason = finish
    return deltas


def failure(code: request_pb2.ErrorCode, message: str) -> Delta:
    """The delta of a request that the worker gives up."""
    error = request_pb2.RequestError(code=code, message=message)
    return Delta(finish_reason=request_pb2.FINISH_REASON_ERROR, error=error)


async def _is_set(event: asyncio.Event, within_s: float) -> bool:
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


@dataclass
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """Answers every request by a script, one delta a step, all requests of a stream in one message a step."""

    script: Script
    instance_id: str = "worker-0"
    incarnation_id: str = "first"
    model: str = "demo"
    step_s: float = 0.0
    """Time between two steps; 0: as fast as the loop turns."""
    received: list[request_pb2.GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    steps: int = 0
    aborted_at_step: dict[str, int] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Announced besides."""
    load: Callable[[], Awaitable[worker_pb2.LoadReport]] | None = None
    """Answers GetLoad."""
    tasks: str = "generate"
    pool: Callable[[worker_pb2.PoolRequest], Awaitable[worker_pb2.PoolResponse | grpc.StatusCode]] | None = None
    """Answers Pool; a status is an error."""
    expand: Callable[[PromptMedia], ExpandedPrompt] | None = None
    """Answers ExpandMedia; may raise RequestRefused, or EngineFailed."""
    beats: bool = True
    """Sends a heartbeat in every second without anything else, as a worker does. Without them a worker that was once
    taken for frozen, say while a test's loop stood still between two examples, would count as such for ever."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._said: list[worker_pb2.WorkerMessage] = []
        self._works: list[asyncio.Event] = []
        self._server = RpcServer(GrpcTransport())
        self._server.add(worker_pb2_grpc.add_WorkerServicer_to_server, self, "penstock.v1.Worker")
        self.address = self._server.address

    def member(self, model_path: str, **attributes: str) -> Member:
        """What a worker announces."""
        known = {
            "tasks": self.tasks,
            "model": self.model,
            "model_path": model_path,
            "block_tokens": "16",
            "max_model_len_tokens": "4096",
        }
        known |= {"engine": "fake", **self.attributes, **attributes}
        return Member("worker", self.instance_id, self.incarnation_id, self.address, "", known)

    async def Pool(self, request: worker_pb2.PoolRequest, context: grpc.aio.ServicerContext) -> worker_pb2.PoolResponse:
        assert self.pool is not None
        answer = await self.pool(request)
        if isinstance(answer, grpc.StatusCode):
            await context.abort(answer, "as the test says")
            raise AssertionError("abort returned")
        return answer

    async def ExpandMedia(
        self, request: worker_pb2.ExpandMediaRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ExpandMediaResponse:
        assert self.expand is not None
        try:
            return expanded_message(self.expand(prompt_media(request.media)))
        except RequestRefused as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except EngineFailed as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        raise AssertionError("abort returned")

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def stop(self) -> None:
        """End at once, cutting all streams, as kill -9 does."""
        await self._server.stop(0)

    def say(self, message: worker_pb2.WorkerMessage) -> None:
        """Send something that no script brought, on every stream."""
        self._said.append(message)
        for work in self._works:
            work.set()

    async def GetLoad(
        self, request: worker_pb2.GetLoadRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetLoadResponse:
        """As the test says."""
        load = await self.load() if self.load is not None else worker_pb2.LoadReport()
        return worker_pb2.GetLoadResponse(load=load)

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Return once something that arrived here makes `condition` true."""
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(condition)

    async def Stream(
        self, messages: AsyncIterator[worker_pb2.FrontendMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        """The data path."""
        running: dict[str, list[Delta]] = {}
        work = asyncio.Event()
        self._works.append(work)
        reader = asyncio.create_task(self._read(messages, running, work))
        try:
            hello = worker_pb2.WorkerHello(instance_id=self.instance_id, incarnation_id=self.incarnation_id)
            yield worker_pb2.WorkerMessage(hello=hello)
            next_s = asyncio.get_running_loop().time()
            while True:
                while not await _is_set(work, HEARTBEAT_S):
                    if self.beats:
                        yield worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat())
                now_s = asyncio.get_running_loop().time()
                next_s = max(next_s + self.step_s, now_s)
                await asyncio.sleep(next_s - now_s)
                step = self._step(running)
                if not running:
                    work.clear()
                while self._said:
                    yield self._said.pop(0)
                if step:
                    yield worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(deltas=step))
        finally:
            reader.cancel()

    def _step(self, running: dict[str, list[Delta]]) -> list[Delta]:
        self.steps += 1
        step = []
        for request_id in list(running):
            deltas = running[request_id]
            if deltas:
                step.append(deltas.pop(0))
            if not deltas:
                del running[request_id]
        return step

    async def _read(
        self, messages: AsyncIterator[worker_pb2.FrontendMessage], running: dict[str, list[Delta]], work: asyncio.Event
    ) -> None:
        async for message in messages:
            if message.HasField("generate"):
                request = message.generate
                self.received.append(request)
                deltas = list(self.script(request))
                for delta in deltas:
                    delta.request_id = request.request_id
                    delta.epoch = request.epoch
                running[request.request_id] = deltas
                work.set()
            elif message.HasField("abort"):
                running.pop(message.abort.request_id, None)
                self.aborted.append(message.abort.request_id)
                self.aborted_at_step[message.abort.request_id] = self.steps
            async with self._changed:
                self._changed.notify_all()


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Places by a function; None: does not answer."""

    choose: Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceResponse | None]
    placed: list[scheduler_pb2.PlaceRequest] = field(default_factory=list)
    ended: list[scheduler_pb2.RequestEnded] = field(default_factory=list)
    linked: list[tuple[str, ...]] = field(default_factory=list)
    """Workers that the frontend is connected to, as of each of its reports."""
    linked_at_place: list[tuple[str, ...]] = field(default_factory=list)
    """The same as it was known at each placement."""
    member_id: str = "scheduler-0"
    is_ready: bool = True
    probes: int = 0

    def __post_init__(self) -> None:
        self._server = RpcServer(GrpcTransport())
        self._server.add(scheduler_pb2_grpc.add_SchedulerServicer_to_server, self, "penstock.v1.Scheduler")
        self.address = self._server.address
        self.member = Member("scheduler", self.member_id, "first", self.address, "")

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def stop(self) -> None:
        """End at once."""
        await self._server.stop(0)

    async def Ready(
        self, request: scheduler_pb2.ReadyRequest, context: grpc.aio.ServicerContext
    ) -> scheduler_pb2.ReadyResponse:
        """As the test says."""
        self.probes += 1
        return scheduler_pb2.ReadyResponse(is_ready=self.is_ready)

    async def PlaceStream(
        self, messages: AsyncIterator[scheduler_pb2.SchedulerMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[scheduler_pb2.PlaceResponse]:
        """The frontends' stream."""
        async for message in messages:
            self.ended += message.ended
            if message.HasField("links"):
                self.linked.append(tuple(worker.instance_id for worker in message.links.workers))
            if not message.HasField("place"):
                continue
            self.linked_at_place.append(self.linked[-1])
            self.placed.append(message.place)
            response = self.choose(message.place)
            if response is not None:
                response.request_id = message.place.request_id
                yield response


@dataclass
class FakeRouter(cascade_pb2_grpc.CascadeServicer):
    """A cascade router that judges by a function; None: nobody could."""

    score: Callable[[cascade_pb2.JudgeRequest], float | None]
    member_id: str = "cascade-0"
    refuses: grpc.StatusCode | None = None
    """Every judgement, with this."""
    waits: asyncio.Event | None = None
    """For this before it answers."""
    judged: list[cascade_pb2.JudgeRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._server = RpcServer(GrpcTransport())
        self._server.add(cascade_pb2_grpc.add_CascadeServicer_to_server, self, "penstock.v1.Cascade")
        self.member = Member("cascade", self.member_id, "first", self._server.address, "")

    async def start(self) -> None:
        """Answer calls."""
        await self._server.start()

    async def stop(self) -> None:
        """End at once."""
        await self._server.stop(0)

    async def Judge(
        self, request: cascade_pb2.JudgeRequest, context: grpc.aio.ServicerContext
    ) -> cascade_pb2.JudgeResponse:
        """As the test says."""
        self.judged.append(request)
        if request.sample_only:
            return cascade_pb2.JudgeResponse()
        if self.waits is not None:
            await self.waits.wait()
        if self.refuses is not None:
            await context.abort(self.refuses, "fake: refuses")
        score = self.score(request)
        if score is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "fake: down", (NO_SCORE,))
            raise AssertionError("abort raises")
        return cascade_pb2.JudgeResponse(score=score, judge="fake")


def by_model(instances: Mapping[str, str]) -> Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceResponse]:
    """A scheduler that knows one instance of each model."""
    return lambda request: always(instances[request.model])(request)


def always(instance_id: str) -> Callable[[scheduler_pb2.PlaceRequest], scheduler_pb2.PlaceResponse]:
    """A scheduler that knows one instance."""
    placed = scheduler_pb2.PLACE_OUTCOME_PLACED
    return lambda _: scheduler_pb2.PlaceResponse(outcome=placed, instance_id=instance_id, policy="fake")


class FakeDirectory:
    """Members come and go as the test says."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._callbacks: list[Callable[[MemberChange], None]] = []

    def subscribe(self, callback: Callable[[MemberChange], None]) -> Callable[[], None]:
        """As `Directory.subscribe`."""
        self._callbacks.append(callback)
        for member in self._members:
            callback(MemberChange(ChangeKind.JOINED, member))
        return lambda: self._callbacks.remove(callback)

    def members(self, role: str) -> tuple[Member, ...]:
        """Those with a role."""
        return tuple(member for member in self._members if member.role == role)

    @property
    def missing(self) -> int:
        """Everybody's record is there."""
        return 0

    def join(self, member: Member) -> None:
        """Announce a member."""
        self._members.append(member)
        self._tell(MemberChange(ChangeKind.JOINED, member))

    def change(self, member: Member) -> None:
        """Announce another record of a member."""
        (known,) = (each for each in self._members if (each.role, each.member_id) == (member.role, member.member_id))
        self._members[self._members.index(known)] = member
        self._tell(MemberChange(ChangeKind.CHANGED, member))

    def leave(self, member: Member) -> None:
        """Take it back."""
        self._members.remove(member)
        self._tell(MemberChange(ChangeKind.LEFT, member))

    def _tell(self, change: MemberChange) -> None:
        for callback in list(self._callbacks):
            callback(change)
