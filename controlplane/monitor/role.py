"""The monitor role: serves reports and watches, and spots instances whose reports have stopped."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import ClassVar

from controlplane.monitor.instance_registry import InstanceRegistry
from controlplane.monitor.metrics import MonitorCollector
from controlplane.monitor.service import MonitorService
from controlplane.monitor.settings import MonitorSettings
from mesh.membership import Directory
from mesh.role import RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import monitor_pb2_grpc

log = logging.getLogger(__name__)

TICK_S = 0.1


class MonitorRole:
    """Gathers the reports of all workers and passes them on to whoever watches."""

    name: ClassVar[str] = "monitor"

    def __init__(self, settings: MonitorSettings) -> None:
        self._settings = settings
        self._service: MonitorService | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._tasks = TaskSet("monitor")

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self._service is not None:
            self._service.registry.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve reports from workers and watches of schedulers; begins with no instance known."""
        clock = context.runtime.clock.now_s
        registry = InstanceRegistry(self._settings.stale_s, self._settings.max_reports_per_s)
        service = MonitorService(context.member_id, registry, self._settings, clock)
        self._service = service
        MonitorCollector(service, clock, context.registry)
        context.server.add(monitor_pb2_grpc.add_MonitorServicer_to_server, service, "penstock.v1.Monitor")
        self._ticking = self._tasks.spawn(self._tick(service, context.directory, clock), name="tick")
        return {}

    async def failed(self) -> None:
        """Raises what ended the staleness detector, without which the monitor would be blind."""
        assert self._ticking is not None, "failed() is called after start()"
        await self._ticking

    async def drain(self) -> None:
        """End the watches; workers and schedulers turn to another monitor, or wait for this one's successor."""
        assert self._service is not None, "drain() is called after start()"
        self._service.close()

    async def stop(self) -> None:
        """Stop looking for instances whose load reports have stopped."""
        await self._tasks.cancel()

    async def _tick(self, service: MonitorService, directory: Directory, clock: Callable[[], float]) -> None:
        settle_until_s = clock() + self._settings.settle_s
        settled = False
        while True:
            if not settled and (clock() >= settle_until_s or not missing_workers(service.registry, directory)):
                settled = True
                log.info("settled", extra={"missing": missing_workers(service.registry, directory)})
                service.settled()
            changes = service.registry.tick(clock())
            for change in changes:
                log.warning(
                    "instance is stale: its load reports have stopped", extra={"instance_id": change.instance_id}
                )
            service.publish(changes)
            await asyncio.sleep(TICK_S)


def missing_workers(registry: InstanceRegistry, directory: Directory) -> list[str]:
    """Workers that are members of the mesh and do not report here (yet)."""
    missing = []
    for member in directory.members("worker"):
        instance = registry.get(member.member_id)
        if instance is None or instance.description.incarnation_id != member.incarnation_id:
            missing.append(member.member_id)
    return missing
