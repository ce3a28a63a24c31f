"""The monitor over loopback: reports in, watches out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from controlplane.monitor.instance_registry import PIECE_BLOCKS
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import monitor_pb2, monitor_pb2_grpc, worker_pb2
from tests.still_clock import StillClock
from tests.unit.controlplane.local_mesh import Running, local_mesh, until

pytestmark = pytest.mark.live

TIME_LIMIT_S = 10.0


class Watched:
    """What one watcher was told."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.changes: list[monitor_pb2.InstanceUpdate] = []
        self.sequences: list[int] = []

    async def until(self, kind: str, instance_id: str = "a") -> monitor_pb2.InstanceUpdate:
        """The next change of that kind."""
        while True:
            update = await self.next()
            for change in update.instances:
                if change.WhichOneof("change") == kind and change.instance_id == instance_id:
                    return change

    async def until_synced(self) -> None:
        while not (await self.next()).synced:
            pass

    async def next(self) -> monitor_pb2.ClusterUpdate:
        update: Any = await self._call.read()
        assert update is not grpc.aio.EOF
        self.sequences.append(update.sequence)
        self.changes += update.instances
        return update  # type: ignore[no-any-return]


@asynccontextmanager
async def watching(monitor: Running) -> AsyncIterator[Watched]:
    async with open_channel(GrpcTransport(), monitor.address) as channel, asyncio.timeout(TIME_LIMIT_S):
        call = monitor_pb2_grpc.MonitorStub(channel).Watch(monitor_pb2.WatchClusterRequest(watcher_id="test"))
        yield Watched(call)
        call.cancel()


async def cluster_until(monitor: Running, wanted: Any) -> monitor_pb2.GetClusterResponse:
    async with open_channel(GrpcTransport(), monitor.address) as channel, asyncio.timeout(TIME_LIMIT_S):
        stub = monitor_pb2_grpc.MonitorStub(channel)
        answer: monitor_pb2.GetClusterResponse = await until(
            lambda: stub.GetCluster(monitor_pb2.GetClusterRequest()), wanted
        )
        return answer


async def test_a_watcher_is_told_the_state_in_pieces_and_then_the_changes() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        worker = await mesh.worker(monitor, "a")
        blocks = range(1, 2 * PIECE_BLOCKS)
        await worker.kv(*blocks, cleared=True)
        await worker.load(running_requests=2)
        await cluster_until(monitor, lambda c: c.instances and c.instances[0].load.running_requests == 2)
        async with watching(monitor) as watched:
            await watched.until_synced()
            told = [change.WhichOneof("change") for change in watched.changes]
            assert told == ["joined", "kv", "kv", "load"]
            assert max(len(change.kv.stored) for change in watched.changes) <= PIECE_BLOCKS
            assert {block for change in watched.changes for block in change.kv.stored} == set(blocks)
            await worker.load(running_requests=3, admitted=["r1"])
            load = (await watched.until("load")).load
            assert load.running_requests == 3
            assert list(load.admitted_request_ids) == ["r1"]
            await worker.kv(7, removed=[1, 2])
            assert list((await watched.until("kv")).kv.removed) == [1, 2]
            assert watched.sequences == list(range(1, len(watched.sequences) + 1))


async def test_the_end_of_a_stream_is_the_instances_end() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        ended, killed = await mesh.worker(monitor, "ended"), await mesh.worker(monitor, "killed")
        async with watching(monitor) as watched:
            await watched.until_synced()
            await ended.end()
            assert "ended" in (await watched.until("lost", "ended")).lost.reason
            killed.break_off()
            await watched.until("lost", "killed")
        assert not (await cluster_until(monitor, lambda c: not c.instances)).instances


async def test_silence_is_stale_and_a_report_freshens() -> None:
    clock = StillClock()
    async with local_mesh() as mesh:
        monitor = await mesh.monitor(clock=clock, stale_s=2.0)
        worker = await mesh.worker(monitor, "a")
        async with watching(monitor) as watched:
            await worker.load()
            await watched.until("load")
            clock.at_s += 2.1
            assert (await watched.until("stale")).stale
            assert monitor.metric("penstock_monitor_instance_stale", instance="a", model="m") == 1
            await worker.load()
            assert not (await watched.until("stale")).stale
        assert monitor.metric("penstock_monitor_instance_stale", instance="a", model="m") == 0


async def test_a_newer_stream_of_an_instance_takes_over() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        older = await mesh.worker(monitor, "a")
        async with watching(monitor) as watched:
            await watched.until_synced()
            await mesh.worker(monitor, "a", incarnation_id="2")
            assert (await watched.until("lost")).incarnation_id == "1"
            assert any(c.joined.incarnation_id == "2" for c in watched.changes) or await watched.until("joined")
        await older.load()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await older.call.read()
        assert ended.value.code() is grpc.StatusCode.ABORTED
        cluster = await cluster_until(monitor, lambda c: True)
        assert [i.instance.incarnation_id for i in cluster.instances] == ["2"]


async def test_a_stream_must_begin_with_a_hello() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        async with open_channel(GrpcTransport(), monitor.address) as channel, asyncio.timeout(TIME_LIMIT_S):
            call = monitor_pb2_grpc.MonitorStub(channel).Report()
            await call.write(monitor_pb2.WorkerReport(load=worker_pb2.LoadReport()))
            with pytest.raises(grpc.aio.AioRpcError, match="must be a hello") as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_slow_watcher_is_cut_off_and_can_start_again() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor(max_backlog=100)
        worker = await mesh.worker(monitor, "a")
        async with watching(monitor) as watched:
            await watched.until_synced()
            await worker.kv(*range(1, 200))
            with pytest.raises(grpc.aio.AioRpcError, match="too slow") as cut:
                await watched.until("stale")
            assert cut.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        async with watching(monitor) as again:
            await again.until_synced()
            assert sum(len(change.kv.stored) for change in again.changes) == 199
        assert monitor.metric("penstock_monitor_watchers_cut_off_total") == 1


async def test_watchers_are_not_told_that_all_is_there_before_the_known_workers_are_back() -> None:
    clock = StillClock()
    async with local_mesh() as mesh:
        await mesh.announce("worker", "a")
        await mesh.announce("worker", "dead")
        await mesh.directory.wait_for("worker", 2, TIME_LIMIT_S)
        monitor = await mesh.monitor(clock=clock, settle_s=3.0, heartbeat_ms=20)
        async with watching(monitor) as watched:
            await mesh.worker(monitor, "a")
            await watched.until("joined")
            assert not any([(await watched.next()).synced for _ in range(10)])
            clock.at_s += 3.0
            await watched.until_synced()
        async with watching(monitor) as later:
            await later.until_synced()


async def test_a_monitor_that_stops_does_not_report_its_instances_lost() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        await mesh.worker(monitor, "a")
        async with watching(monitor) as watched:
            await watched.until_synced()
            await monitor.role.drain()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await watched.until("lost")
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
            await mesh.kill(monitor)
        assert not [change for change in watched.changes if change.WhichOneof("change") == "lost"]


async def test_metrics_tell_every_instances_load() -> None:
    async with local_mesh() as mesh:
        monitor = await mesh.monitor()
        worker = await mesh.worker(monitor, "a")
        await worker.kv(1, 2, 3)
        await worker.load(running_requests=5, generated_tokens_total=77)
        await cluster_until(monitor, lambda c: c.instances and c.instances[0].load.running_requests == 5)
        labels = {"instance": "a", "model": "m"}
        assert monitor.metric("penstock_monitor_instance_running_requests", **labels) == 5
        assert monitor.metric("penstock_monitor_instance_generated_tokens_total", **labels) == 77
        assert monitor.metric("penstock_monitor_instance_cached_blocks", **labels) == 3
