"""The watch on a monitor: dialled, read, and dialled again, at another monitor where there is one."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from controlplane.scheduler.feed import ClusterFeed
from controlplane.scheduler.metrics import SchedulerMetrics
from mesh.errors import DeadlineExceeded, IllegalTransition, PeerUnavailable, RpcError
from mesh.membership import ChangeKind, Directory, Member, MemberChange
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport
from penstock.v1 import monitor_pb2, monitor_pb2_grpc

log = logging.getLogger(__name__)

REDIAL_S = 0.25


class MonitorWatch:
    """Feeds the cluster table from one monitor at a time."""

    def __init__(
        self,
        scheduler_id: str,
        directory: Directory,
        feed: ClusterFeed,
        metrics: SchedulerMetrics,
        silence_s: float,
        clock: Callable[[], float],
        transport: Transport,
        on_synced: Callable[[], None],
    ) -> None:
        """`on_synced` is called when the table in force has become a watch's own."""
        self._scheduler_id = scheduler_id
        self._directory = directory
        self._feed = feed
        self._metrics = metrics
        self._silence_s = silence_s
        self._clock = clock
        self._transport = transport
        self._on_synced = on_synced
        self._attempts = 0

    async def follow(self) -> None:
        """Keep a watch open to some monitor until cancelled; where one ends, the next monitor is tried."""
        unsubscribe = self._directory.subscribe(self._on_member)
        try:
            while True:
                monitors = self._directory.members("monitor")
                if monitors:
                    monitor = monitors[self._attempts % len(monitors)]
                    await self._watch_loudly(monitor)
                    self._attempts += 1
                await asyncio.sleep(REDIAL_S)
        finally:
            unsubscribe()

    async def _watch_loudly(self, monitor: Member) -> None:
        try:
            await self._watch(monitor)
        except (RpcError, IllegalTransition) as error:
            log.warning("the watch of the monitor broke; watching again", extra={"error": str(error)})

    async def _watch(self, monitor: Member) -> None:
        """Until it breaks. Raises `RpcError` or `IllegalTransition`."""
        peer = f"monitor {monitor.member_id} at {monitor.address}"
        self._metrics.resyncs.inc()
        self._feed.begin()
        try:
            async with open_channel(self._transport, monitor.address, monitor.role) as channel:
                stub = monitor_pb2_grpc.MonitorStub(channel)  # type: ignore[no-untyped-call]
                await self._read(stub.Watch(monitor_pb2.WatchClusterRequest(watcher_id=self._scheduler_id)))
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} was silent for {self._patience_s():g} s") from None
        except grpc.aio.AioRpcError as error:
            raise rpc_error(error, peer) from error
        finally:
            self._feed.end()
        raise PeerUnavailable(f"{peer} has ended the watch")

    async def _read(self, call: Any) -> None:
        try:
            while True:
                async with asyncio.timeout(self._patience_s()):
                    update = await call.read()
                if update is grpc.aio.EOF:
                    return
                was_synced = self._feed.synced
                self._feed.apply(update, self._clock())
                if self._feed.synced and not was_synced:
                    log.info("the cluster is known", extra={"instances": len(self._feed.table.instances())})
                    self._on_synced()
        finally:
            call.cancel()

    def _patience_s(self) -> float:
        """With another monitor to go to, half of the silence after which placements fall back: they need not."""
        return self._silence_s / 2 if len(self._directory.members("monitor")) > 1 else self._silence_s

    def _on_member(self, change: MemberChange) -> None:
        """While no monitor tells, the directory does: a worker whose lease has ended is gone."""
        member = change.member
        if member.role != "worker":
            return
        if change.kind is not ChangeKind.LEFT:
            self._feed.announced(member.member_id, member.incarnation_id)
        elif self._feed.left(member.member_id, member.incarnation_id):
            log.warning("instance lost: it has left the mesh", extra={"instance_id": member.member_id})
