"""Carries out what the liveness monitor decides: probes workers, and takes requests from those that hang."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import grpc

from controlplane.model.incarnation import Incarnation
from mesh.rpc.client import open_channel
from mesh.runtime import Transport
from mesh.tasks import TaskSet
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.frontend.metrics import FrontendMetrics
from services.frontend.workers.link import WorkerLink
from services.frontend.workers.liveness import Hang, Hung, LivenessMonitor, Probe, Sighting

log = logging.getLogger(__name__)

SYMPTOMS: Final = {
    Hang.FROZEN: "it gives no sign of life",
    Hang.STALLED: "its engine makes no step",
    Hang.DEAF: "it sends, and gets nothing that it is sent",
}


class HangWatch:
    """`tick` it some ten times a second."""

    def __init__(
        self,
        monitor: LivenessMonitor,
        transport: Transport,
        metrics: FrontendMetrics,
        tasks: TaskSet,
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._monitor = monitor
        self._transport = transport
        self._metrics = metrics
        for hang in Hang:  # so that the first one is a rise from 0
            metrics.hung_workers.labels(hang.value)
        self._tasks = tasks
        self._on_failed = on_failed

    def tick(self, links: Mapping[Incarnation, WorkerLink], owned: Mapping[Incarnation, int], now_s: float) -> None:
        """Look at all links; `owned`: how many requests each worker has."""
        sightings = {
            sender: Sighting(owned.get(sender, 0), link.messages, link.stalled_s, link.heard_messages, link.unheard)
            for sender, link in links.items()
            if link.connected.is_set()
        }
        for finding in self._monitor.look(now_s, sightings):
            link = links[finding.worker]
            if isinstance(finding, Probe):
                self._tasks.spawn(
                    self._probe(link, finding), name=f"probe {link.instance_id}", on_error=self._on_failed
                )
            else:
                self._take_requests(link, finding)

    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        self._monitor.validate()

    async def _probe(self, link: WorkerLink, probe: Probe) -> None:
        is_alive = await _answers(self._transport, link.member.address, probe.deadline_s)
        self._monitor.probed(probe.worker, is_alive=is_alive)

    def _take_requests(self, link: WorkerLink, hung: Hung) -> None:
        reason = f"{SYMPTOMS[hung.hang]} for {hung.silence_s:.1f} s"
        log.critical(
            "a worker hangs", extra={"instance_id": link.instance_id, "hang": hung.hang.value, "reason": reason}
        )
        self._metrics.hung_workers.labels(hung.hang.value).inc()
        link.note_hang(hung.hang)
        link.drop_requests(reason)


async def _answers(transport: Transport, address: str, deadline_s: float) -> bool:
    async with open_channel(transport, address, "worker") as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=deadline_s)
        except grpc.aio.AioRpcError:
            return False
        return True
