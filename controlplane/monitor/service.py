"""The monitor's gRPC methods: reports in, watches out."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from controlplane.monitor.instance_registry import InstanceRegistry, ReportedInstance
from controlplane.monitor.settings import MonitorSettings
from controlplane.monitor.watcher import Watcher
from penstock.v1 import monitor_pb2, monitor_pb2_grpc

log = logging.getLogger(__name__)

ACK_INTERVAL_S = 1.0
WRITE_TIMEOUT_S = 5.0
"""A peer that does not read for this long is cut off."""


class MonitorService(monitor_pb2_grpc.MonitorServicer):
    """Feeds the registry from report streams and the watchers from the registry."""

    def __init__(
        self, monitor_id: str, registry: InstanceRegistry, settings: MonitorSettings, clock: Callable[[], float]
    ) -> None:
        self.registry = registry
        self.watchers: dict[Watcher, asyncio.Event] = {}
        self.watchers_cut_off_total = 0
        self._monitor_id = monitor_id
        self._settings = settings
        self._clock = clock
        self._closing = False
        self._settled = asyncio.Event()

    # -- from the workers

    async def Report(self, request_iterator: Any, context: Any) -> None:
        """One worker's stream, from its hello to its end."""
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        if message.WhichOneof("report") != "hello" or not message.hello.instance_id:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                "the first message of a report stream must be a hello with an instance id",
            )
        instance, changes = self.registry.joined(message.hello, self._clock())
        self.publish(changes)
        log.info("instance joined", extra=_names(instance))
        reason = "its report stream broke"
        try:
            reason = await self._take_reports(instance, context)
        finally:
            if self.registry.get(instance.instance_id) is instance:
                log.warning("instance lost", extra={**_names(instance), "reason": reason})
                self.publish(self.registry.lost(instance, reason))
        if instance.superseded:
            await context.abort(grpc.StatusCode.ABORTED, f"a newer stream reports for instance {instance.instance_id}")

    async def _take_reports(self, instance: ReportedInstance, context: Any) -> str:
        """Take in a worker's reports until its stream ends; returns why it did."""
        acked_s = float("-inf")
        while not instance.superseded:
            if self._clock() - acked_s >= ACK_INTERVAL_S:
                acked_s = self._clock()
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    interval_ms = self.registry.report_interval_ms
                    await context.write(
                        monitor_pb2.ReportAck(monitor_id=self._monitor_id, report_interval_ms=interval_ms)
                    )
            message = await context.read()
            if message is grpc.aio.EOF:
                return "its report stream ended"
            if not instance.superseded:
                await self._take_report(instance, message, context)
        return "a newer stream of the instance has begun"

    async def _take_report(self, instance: ReportedInstance, message: monitor_pb2.WorkerReport, context: Any) -> None:
        match message.WhichOneof("report"):
            case "load":
                self.publish(self.registry.loaded(instance, message.load, self._clock()))
            case "kv":
                self.publish(self.registry.cached(instance, message.kv))
            case "decode":
                self.publish(self.registry.decoding(instance, message.decode))
            case other:
                await context.abort(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    f"after the hello come load, kv and decode reports, not {other or 'nothing'}",
                )

    # -- to the watchers

    def publish(self, changes: Iterable[monitor_pb2.InstanceUpdate]) -> None:
        """Queue the changes for every watcher."""
        if self._closing:
            return
        for change in changes:
            for watcher, wake in self.watchers.items():
                watcher.offer(change)
                wake.set()

    def settled(self) -> None:
        """All workers that were there before have come back: watchers may be told that they have everything."""
        self._settled.set()

    def close(self) -> None:
        """End the watches before the report streams end: the instances live on, and watchers must not take them
        for lost because their monitor stops."""
        self._closing = True
        for wake in self.watchers.values():
            wake.set()

    async def Watch(self, request: monitor_pb2.WatchClusterRequest, context: Any) -> None:
        """The whole state in pieces, then changes as they come."""
        watcher = Watcher(
            request.watcher_id,
            (instance.instance_id for instance in self.registry.instances()),
            self._settings.max_backlog,
        )
        wake = self.watchers[watcher] = asyncio.Event()
        log.info("watch began", extra={"watcher_id": watcher.watcher_id})
        try:
            await self._tell(watcher, wake, _Numbered(context))
        except TimeoutError:
            watcher.cut_off = True
        finally:
            del self.watchers[watcher]
            log.info("watch ended", extra={"watcher_id": watcher.watcher_id})
        if watcher.cut_off:
            self.watchers_cut_off_total += 1
            log.error("a watcher was too slow and is cut off", extra={"watcher_id": watcher.watcher_id})
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too slow: changes had to be dropped; watch again")
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the monitor is stopping; watch again")

    async def _tell(self, watcher: Watcher, wake: asyncio.Event, out: "_Numbered") -> None:
        """Return when the watcher is cut off or the monitor closes."""
        while (instance_id := watcher.next_undescribed()) is not None and not watcher.cut_off:
            instance = self.registry.get(instance_id)
            for piece in self.registry.describe(instance) if instance is not None else ():
                await out.write([piece])
            while changes := watcher.take():
                await out.write(changes)
        synced = False
        while not watcher.cut_off and not self._closing:
            if not synced and self._settled.is_set():
                synced = True
                await out.write(watcher.take(), synced=True)
            await self._gather(wake)
            await out.write(watcher.take())
            while changes := watcher.take():
                await out.write(changes)

    async def _gather(self, wake: asyncio.Event) -> None:
        """Wait for a change and then for those that follow at once; or for the time of a heartbeat."""
        try:
            async with asyncio.timeout(self._settings.heartbeat_ms / 1000):
                await wake.wait()
        except TimeoutError:
            return
        await asyncio.sleep(self._settings.flush_ms / 1000)
        wake.clear()

    async def GetCluster(self, request: monitor_pb2.GetClusterRequest, context: Any) -> monitor_pb2.GetClusterResponse:
        """All instances with their last reports."""
        now_s = self._clock()
        return monitor_pb2.GetClusterResponse(
            instances=[
                monitor_pb2.ClusterInstance(
                    instance=instance.description,
                    load=instance.load,
                    load_age_ms=int(1000 * (now_s - instance.load_s)),
                    stale=instance.stale,
                    cached_blocks=len(instance.blocks),
                    host_blocks=len(instance.host_blocks),
                    disk_blocks=len(instance.disk_blocks),
                )
                for instance in self.registry.instances()
            ]
        )


class _Numbered:
    """Writes updates with ascending sequence numbers."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._sequence = 0

    async def write(self, changes: list[monitor_pb2.InstanceUpdate], *, synced: bool = False) -> None:
        """Raises TimeoutError if the watcher does not read."""
        self._sequence += 1
        update = monitor_pb2.ClusterUpdate(sequence=self._sequence, instances=changes, synced=synced)
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await self._context.write(update)


def _names(instance: ReportedInstance) -> dict[str, str]:
    return {
        "instance_id": instance.instance_id,
        "incarnation_id": instance.description.incarnation_id,
        "model": instance.description.model,
        "address": instance.description.address,
    }
