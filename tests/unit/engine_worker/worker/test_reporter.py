"""What monitors hear, over real gRPC on loopback, with a scripted engine."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.policies.rescheduling.record import ReschedulerRecord
from engine_worker import cache_ledger
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.reporter import Reporter
from engine_worker.settings import WorkerSettings
from mesh.membership import ChangeKind, Member, MemberChange
from mesh.rpc.server import RpcServer
from mesh.runtime import GrpcTransport, system_runtime
from penstock.v1 import monitor_pb2, monitor_pb2_grpc, worker_pb2
from tests.unit.engine_worker.worker.fake_engine import FakeEngine, make_request
from tests.unit.engine_worker.worker.running_worker import DESCRIPTION, SETTINGS, WAIT_S, Clock

pytestmark = pytest.mark.live

# Nothing is due by the clock within a test.
SLOW = replace(SETTINGS, report_interval_ms=10_000, heartbeat_ms=20_000)
QUICK = replace(SETTINGS, report_interval_ms=1, heartbeat_ms=20)


class FakeDirectory:
    """Members that a test lets join and leave."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[MemberChange], None]] = []

    def subscribe(self, callback: Callable[[MemberChange], None]) -> Callable[[], None]:
        self.callbacks.append(callback)
        return lambda: self.callbacks.remove(callback)

    def tell(self, kind: ChangeKind, address: str, role: str = "monitor", member_id: str = "monitor-0") -> None:
        for callback in self.callbacks:
            callback(MemberChange(kind, Member(role, member_id, "1", address, "")))


class FakeMonitor(monitor_pb2_grpc.MonitorServicer):
    """Keeps what it is told, one list for each stream."""

    def __init__(self) -> None:
        self.streams: list[list[monitor_pb2.WorkerReport]] = []
        self.open_streams = 0
        self.news = asyncio.Event()

    async def Report(self, inbound: AsyncIterator[monitor_pb2.WorkerReport], context: Any) -> None:
        heard: list[monitor_pb2.WorkerReport] = []
        self.streams.append(heard)
        self.open_streams += 1
        try:
            async for report in inbound:
                heard.append(report)
                self.news.set()
                await context.write(monitor_pb2.ReportAck(monitor_id="monitor-0"))
        finally:
            self.open_streams -= 1
            self.news.set()

    async def until(self, condition: Callable[[], Any]) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not (result := condition()):
                self.news.clear()
                await self.news.wait()
        return result

    def loads(self, stream: int = -1) -> list[worker_pb2.LoadReport]:
        return [report.load for report in self.streams[stream] if report.HasField("load")] if self.streams else []

    def blocks(self, stream: int = -1) -> set[int]:
        blocks = {-1}
        for report in self.streams[stream]:
            if report.HasField("kv"):
                blocks = set() if report.kv.cleared else blocks
                blocks |= set(report.kv.stored)
                blocks -= set(report.kv.removed)
        return blocks


class Mesh:
    """A reporting instance and one monitor."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.engine, self.clock, self.directory = FakeEngine(), Clock(), FakeDirectory()
        self.registry = CollectorRegistry()
        metrics = WorkerMetrics(self.registry)
        self.instance = Instance(self.engine, DESCRIPTION, settings, metrics, self.clock)
        self.reporter = Reporter(self.instance, settings, metrics, system_runtime())
        self.servers: list[RpcServer] = []
        self.monitor = FakeMonitor()
        self.output = asyncio.create_task(self.instance.run())
        self.stream = self.instance.open_stream("frontend-0")

    async def serve_monitor(self, bind: str = "127.0.0.1:0") -> RpcServer:
        server = RpcServer(GrpcTransport(), bind)
        server.add(monitor_pb2_grpc.add_MonitorServicer_to_server, self.monitor, "penstock.v1.Monitor")
        await server.start()
        self.servers.append(server)
        return server


@pytest.fixture
async def make_mesh() -> AsyncIterator[Callable[[WorkerSettings], Any]]:
    meshes: list[Mesh] = []

    async def make(settings: WorkerSettings) -> Mesh:
        mesh = Mesh(settings)
        meshes.append(mesh)
        server = await mesh.serve_monitor()
        mesh.reporter.start(mesh.directory, mesh.engine.kv_blocks())  # type: ignore[arg-type]
        mesh.directory.tell(ChangeKind.JOINED, "127.0.0.1:9", role="scheduler", member_id="scheduler-0")
        mesh.directory.tell(ChangeKind.JOINED, server.address)
        return mesh

    yield make
    for mesh in meshes:
        await mesh.reporter.stop()
        mesh.output.cancel()
        for server in mesh.servers:
            await server.stop(0.1)


async def test_a_stream_opens_with_hello_everything_held_and_the_load(make_mesh: Any) -> None:
    mesh = await make_mesh(SLOW)
    await mesh.monitor.until(mesh.monitor.loads)
    hello, kv, load = mesh.monitor.streams[0]
    assert hello.hello.instance_id == "worker-0"
    assert hello.hello.incarnation_id == "0badcafe"
    assert kv.kv.cleared
    assert load.load.state == worker_pb2.INSTANCE_STATE_READY
    assert len(mesh.monitor.streams) == 1, "only monitors are reported to"


async def test_load_follows_steps_no_faster_than_the_interval(make_mesh: Any) -> None:
    mesh = await make_mesh(replace(SLOW, report_interval_ms=200))
    await mesh.monitor.until(mesh.monitor.loads)
    first_s = asyncio.get_running_loop().time()
    mesh.instance.submit(mesh.stream, make_request("a"), model="m")
    for _ in range(50):
        mesh.engine.step()
    loads = await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > 1 and mesh.monitor.loads())
    # The monitor hears of the first one a moment after it was sent.
    assert asyncio.get_running_loop().time() - first_s > 0.15
    assert len(loads) == 2, "the steps are told together"
    assert loads[1].generated_tokens_total == 50
    assert list(loads[1].admitted_request_ids) == ["a"]


async def test_an_idle_worker_still_gives_signs_of_life(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(lambda: len(mesh.monitor.loads()) >= 4)


async def test_each_admission_and_each_end_is_told_once(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(mesh.monitor.loads)
    for number in range(6):
        mesh.instance.submit(mesh.stream, make_request(f"r{number}"), model="m")
        mesh.engine.step(finish={f"r{number}"})
        await mesh.monitor.until(lambda told=number + 1: len(admitted(mesh.monitor)) >= told)
    count = len(mesh.monitor.loads())
    await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > count + 1)
    assert admitted(mesh.monitor) == [f"r{number}" for number in range(6)]
    ended = [request_id for load in mesh.monitor.loads() for request_id in load.ended_request_ids]
    assert ended == admitted(mesh.monitor)


def admitted(monitor: FakeMonitor) -> list[str]:
    return [request_id for load in monitor.loads() for request_id in load.admitted_request_ids]


async def test_cache_changes_arrive_in_bounded_pieces(make_mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_ledger.KvBacklog.take, "__defaults__", (7,))
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(mesh.monitor.loads)
    mesh.engine.change_cache(KvBlocks(stored=tuple(range(50))))
    mesh.engine.change_cache(KvBlocks(stored=tuple(range(50, 60)), removed=tuple(range(10))))
    await mesh.monitor.until(lambda: mesh.monitor.blocks() == set(range(10, 60)))
    pieces = [report.kv for report in mesh.monitor.streams[0] if report.HasField("kv")]
    assert len(pieces) > 5
    assert all(len(piece.stored) + len(piece.removed) <= 7 for piece in pieces)


async def test_a_monitor_that_comes_back_is_told_everything_again(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    mesh.instance.submit(mesh.stream, make_request("a"), model="m")
    mesh.engine.change_cache(KvBlocks(stored=(1, 2, 3)))
    await mesh.monitor.until(lambda: mesh.monitor.streams and mesh.monitor.blocks() == {1, 2, 3})
    server = await mesh.serve_monitor()
    mesh.directory.tell(ChangeKind.LEFT, "")
    mesh.engine.change_cache(KvBlocks(removed=(2,)))
    await mesh.monitor.until(lambda: mesh.monitor.open_streams == 0)
    mesh.directory.tell(ChangeKind.JOINED, server.address)
    await mesh.monitor.until(lambda: len(mesh.monitor.streams) == 2 and mesh.monitor.loads())
    assert mesh.monitor.streams[1][0].HasField("hello")
    assert mesh.monitor.streams[1][1].kv.cleared
    assert mesh.monitor.blocks() == {1, 3}
    assert list(mesh.monitor.loads()[0].admitted_request_ids) == ["a"], "the load counts it, so its id belongs there"


async def test_a_monitor_that_dies_is_dialled_again_within_a_second_or_so(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    mesh.engine.change_cache(KvBlocks(stored=(1,)))
    gone = await mesh.serve_monitor()
    mesh.directory.tell(ChangeKind.JOINED, gone.address, member_id="monitor-1")
    await mesh.monitor.until(lambda: len(mesh.monitor.streams) == 2 and mesh.monitor.loads(0) and mesh.monitor.loads(1))
    await gone.stop(0.0)
    await mesh.serve_monitor(gone.address)
    await mesh.monitor.until(lambda: len(mesh.monitor.streams) == 3 and mesh.monitor.blocks() == {1})
    assert (mesh.registry.get_sample_value("penstock_worker_report_failures_total") or 0) >= 1


async def test_a_drain_is_told_at_once(make_mesh: Any) -> None:
    mesh = await make_mesh(SLOW)
    await mesh.monitor.until(mesh.monitor.loads)
    mesh.instance.start_draining()
    loads = await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > 1 and mesh.monitor.loads())
    assert loads[-1].state == worker_pb2.INSTANCE_STATE_DRAINING


async def test_a_hung_engine_reports_no_load_until_it_makes_steps_again(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(mesh.monitor.loads)
    mesh.instance.submit(mesh.stream, make_request("a"), model="m")
    mesh.engine.present_load = LoadReport(running_requests=1)
    mesh.instance.tick()
    mesh.clock.now_s += QUICK.hang_s + 1
    mesh.instance.tick()
    assert mesh.instance.hung
    mesh.engine.change_cache(KvBlocks(stored=(7,)))
    await mesh.monitor.until(lambda: 7 in mesh.monitor.blocks())
    count = len(mesh.monitor.loads())
    mesh.engine.change_cache(KvBlocks(stored=(8,)))
    await mesh.monitor.until(lambda: 8 in mesh.monitor.blocks())
    assert len(mesh.monitor.loads()) == count, "cache changes are told, the load is not"
    assert mesh.monitor.open_streams == 1
    stepped = asyncio.Event()
    mesh.instance.on_change.append(stepped.set)
    mesh.engine.step()
    await asyncio.wait_for(stepped.wait(), WAIT_S)
    mesh.instance.tick()
    await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > count)


async def test_when_the_cache_events_break_the_index_is_emptied(make_mesh: Any, caplog: Any) -> None:
    mesh = await make_mesh(QUICK)
    mesh.engine.change_cache(KvBlocks(stored=(1, 2, 3)))
    await mesh.monitor.until(lambda: mesh.monitor.streams and mesh.monitor.blocks() == {1, 2, 3})
    mesh.engine._cache.put_nowait(RuntimeError("no more events"))
    await mesh.monitor.until(lambda: mesh.monitor.blocks() == set())
    assert "a background task died" in caplog.text


async def test_the_end_of_the_worker_ends_its_report_stream(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(mesh.monitor.loads)
    await mesh.reporter.stop()
    await mesh.monitor.until(lambda: mesh.monitor.open_streams == 0)


async def test_decoding_requests_are_told_of_at_the_meshs_interval(make_mesh: Any) -> None:
    mesh = await make_mesh(QUICK)

    def decoding() -> list[list[str]]:
        heard = mesh.monitor.streams[-1] if mesh.monitor.streams else []
        return [list(report.decode.request_ids) for report in heard if report.HasField("decode")]

    mesh.reporter.decoding.configure(ReschedulerRecord("current", {"interval_s": 0.05}), 1)
    await mesh.monitor.until(lambda: len(decoding()) > 1)
    assert decoding()[0] == []
    mesh.instance.submit(mesh.stream, make_request("r"), model="m")
    mesh.engine.step()
    await mesh.monitor.until(lambda: decoding()[-1] == ["r"])
    mesh.reporter.decoding.configure(ReschedulerRecord("off"), 2)
    told, loads = len(decoding()), len(mesh.monitor.loads())
    await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > loads + 6)
    assert len(decoding()) <= told + 1, "one may have been on its way"


async def test_a_monitor_that_is_announced_at_another_address_is_reported_to_there_once_its_stream_ends(
    make_mesh: Any,
) -> None:
    mesh = await make_mesh(QUICK)
    await mesh.monitor.until(mesh.monitor.loads)
    elsewhere = await mesh.serve_monitor()
    mesh.directory.tell(ChangeKind.CHANGED, elsewhere.address)
    loads = len(mesh.monitor.loads())
    await mesh.monitor.until(lambda: len(mesh.monitor.loads()) > loads + 1)
    assert len(mesh.monitor.streams) == 1, "what works is left alone"
    await mesh.servers[0].stop(0.0)
    await mesh.monitor.until(lambda: len(mesh.monitor.streams) == 2 and mesh.monitor.loads())
    mesh.directory.tell(ChangeKind.LEFT, elsewhere.address)
    await mesh.monitor.until(lambda: mesh.monitor.open_streams == 0)
