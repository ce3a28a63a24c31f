"""Monitor and scheduler in this process, over loopback, with workers that are played by the test."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import msgspec
from prometheus_client import CollectorRegistry

from controlplane.monitor.role import MonitorRole
from controlplane.monitor.settings import MonitorSettings
from controlplane.scheduler.role import SchedulerRole
from controlplane.scheduler.settings import SchedulerSettings
from mesh.membership import WITHDRAWN, Directory, Member
from mesh.role import Role, RoleContext
from mesh.rpc.client import open_channel
from mesh.rpc.server import RpcServer
from mesh.runtime import Clock, GrpcTransport, SystemClock, system_runtime
from mesh.store import StateStore, open_store
from penstock.v1 import monitor_pb2, monitor_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc, worker_pb2

MODEL = "m"
TIME_LIMIT_S = 20.0


class Running:
    """A role that runs; its metrics."""

    def __init__(self, role: Role, context: RoleContext) -> None:
        self.role = role
        self.context = context
        self.address = context.address

    def metric(self, name: str, **labels: str) -> float | None:
        return self.context.registry.get_sample_value(name, labels)


class LocalMesh:
    """A store and a directory; roles are started and stopped in it, workers announced."""

    def __init__(self, store: StateStore, directory: Directory, exit_stack: AsyncExitStack) -> None:
        self.store = store
        self.directory = directory
        self._exit_stack = exit_stack
        self._running: dict[str, AsyncExitStack] = {}

    async def start(self, role: Role, member_id: str, clock: Clock | None = None) -> Running:
        server = RpcServer(GrpcTransport())
        context = RoleContext(
            role.name,
            member_id,
            "1",
            server.address,
            self.store,
            self.directory,
            server,
            CollectorRegistry(),
            replace(system_runtime(), clock=clock or SystemClock()),
        )
        stack = AsyncExitStack()
        stack.push_async_callback(server.stop, 0)
        stack.push_async_callback(role.stop)
        self._running[member_id] = stack
        await role.start(context)
        await server.start()
        await self.announce(role.name, member_id, server.address)
        return Running(role, context)

    async def monitor(self, member_id: str = "monitor-0", clock: Clock | None = None, **settings: Any) -> Running:
        return await self.start(MonitorRole(MonitorSettings(**settings)), member_id, clock)

    async def scheduler(self, member_id: str = "scheduler-0", clock: Clock | None = None, **settings: Any) -> Running:
        return await self.start(SchedulerRole(SchedulerSettings(**settings)), member_id, clock)

    async def kill(self, running: Running) -> None:
        """Every stream breaks; the lease has not run out yet."""
        await self._running.pop(running.context.member_id).aclose()

    async def announce(self, role: str, member_id: str, address: str = "127.0.0.1:1") -> None:
        member = Member(role, member_id, "1", address, "")
        await self.store.put(member.key, msgspec.json.encode(member))

    async def withdraw(self, role: str, member_id: str) -> None:
        key = Member(role, member_id, "1", "", "").key
        await self.store.put(key, WITHDRAWN)
        await self.store.delete(key)

    async def worker(self, monitor: Running, instance_id: str, **facts: Any) -> "PlayedWorker":
        """A worker whose report stream has begun."""
        channel = await self._exit_stack.enter_async_context(open_channel(GrpcTransport(), monitor.address))
        worker = PlayedWorker(monitor_pb2_grpc.MonitorStub(channel).Report(), instance_id)
        await worker.hello(**facts)
        return worker

    async def close(self) -> None:
        for stack in list(self._running.values()):
            await stack.aclose()


class PlayedWorker:
    """A worker's side of a report stream."""

    def __init__(self, call: Any, instance_id: str) -> None:
        self.call = call
        self.instance_id = instance_id

    async def hello(self, incarnation_id: str = "1", model: str = MODEL, phase: str = "UNSPECIFIED") -> None:
        description = worker_pb2.InstanceDescription(
            instance_id=self.instance_id,
            incarnation_id=incarnation_id,
            model=model,
            address=f"{self.instance_id}:1",
            block_tokens=16,
            kv_blocks=100,
            phase=worker_pb2.InstancePhase.Value(f"INSTANCE_PHASE_{phase}"),
        )
        await self.call.write(monitor_pb2.WorkerReport(hello=description))
        ack = await self.call.read()
        assert ack is not grpc.aio.EOF

    async def load(
        self, admitted: Sequence[str] = (), state: Any = worker_pb2.INSTANCE_STATE_READY, **load: int
    ) -> None:
        report = worker_pb2.LoadReport(state=state, admitted_request_ids=admitted, **load)  # type: ignore[arg-type]
        await self.call.write(monitor_pb2.WorkerReport(load=report))

    async def kv(self, *stored: int, removed: Sequence[int] = (), cleared: bool = False) -> None:
        change = monitor_pb2.KvUpdate(stored=stored, removed=removed, cleared=cleared)
        await self.call.write(monitor_pb2.WorkerReport(kv=change))

    async def end(self) -> None:
        await self.call.done_writing()
        while await self.call.read() is not grpc.aio.EOF:
            pass

    def break_off(self) -> None:
        """As a process that is killed."""
        self.call.cancel()


@asynccontextmanager
async def local_mesh() -> AsyncIterator[LocalMesh]:
    """A test that waits in vain fails after the time limit."""
    async with asyncio.timeout(TIME_LIMIT_S), AsyncExitStack() as stack:
        store = open_store("embedded:", system_runtime())
        stack.push_async_callback(store.close)
        directory = Directory(store)
        await directory.start()
        stack.push_async_callback(directory.stop)
        mesh = LocalMesh(store, directory, stack)
        stack.push_async_callback(mesh.close)
        yield mesh


@asynccontextmanager
async def scheduler_stub(scheduler: Running) -> AsyncIterator[scheduler_pb2_grpc.SchedulerStub]:
    async with open_channel(GrpcTransport(), scheduler.address) as channel:
        yield scheduler_pb2_grpc.SchedulerStub(channel)


async def until(read: Callable[[], Any], wanted: Callable[[Any], bool]) -> Any:
    """Call `read` until its answer is wanted; the mesh's time limit bounds it."""
    while not wanted(answer := await read()):
        pass
    return answer


async def snapshot_until(
    stub: scheduler_pb2_grpc.SchedulerStub, wanted: Callable[[scheduler_pb2.GetSnapshotResponse], bool]
) -> scheduler_pb2.GetSnapshotResponse:
    answer: scheduler_pb2.GetSnapshotResponse = await until(
        lambda: stub.GetSnapshot(scheduler_pb2.GetSnapshotRequest()), wanted
    )
    return answer


def states(snapshot: scheduler_pb2.GetSnapshotResponse) -> dict[str, str]:
    return {instance.instance_id: instance.state for instance in snapshot.instances}


def place_request(request_id: str = "r", **what: Any) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(**{"request_id": request_id, "model": MODEL, "prompt_tokens": 100, **what})
