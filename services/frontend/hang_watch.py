"""Tells a worker that hangs from one that is merely busy with others' requests."""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import grpc

from controlplane.protocols.ownership import Sender
from mesh.rpc.client import open_channel, rpc_error
from mesh.tasks import TaskSet
from penstock.v1 import worker_pb2, worker_pb2_grpc
from services.frontend.metrics import FrontendMetrics
from services.frontend.worker_link import WorkerLink

log = logging.getLogger(__name__)

PROBE_DEADLINE_S: Final = 1.0


@dataclass(slots=True)
class _Silence:
    """Of one link."""

    messages: int
    since_s: float
    progress: tuple[int, int] | None = None
    """Tokens generated and prefilled, as of the latest probe of this silence."""
    probing: bool = False


class HangWatch:
    """A worker that owns requests of ours and sends nothing for `stall_s` is asked for its load. It hangs if it does
    not answer, or if it has computed no token between two such questions: then its requests are taken from it."""

    def __init__(
        self, stall_s: float, metrics: FrontendMetrics, tasks: TaskSet, on_failed: Callable[[BaseException], None]
    ) -> None:
        self._stall_s = stall_s
        self._metrics = metrics
        self._tasks = tasks
        self._on_failed = on_failed
        self._silences: dict[Sender, _Silence] = {}

    def tick(self, links: Iterable[WorkerLink], owned: Mapping[Sender, int], now_s: float) -> None:
        """Call it a few times per second with all links and how many requests each worker has."""
        silences, self._silences = self._silences, {}
        for link in links:
            silence = silences.get(link.sender)
            if silence is None or link.messages != silence.messages or not owned.get(link.sender):
                silence = _Silence(link.messages, now_s)
            elif now_s - silence.since_s >= self._stall_s and not silence.probing and link.connected.is_set():
                silence.probing = True
                self._tasks.spawn(
                    self._probe(link, silence), name=f"probe {link.instance_id}", on_error=self._on_failed
                )
            self._silences[link.sender] = silence

    async def _probe(self, link: WorkerLink, silence: _Silence) -> None:
        try:
            load = await _ask_load(link.member.address)
        except grpc.aio.AioRpcError as error:
            self._report_hang(link, silence, str(rpc_error(error, f"worker {link.instance_id}")))
            return
        progress = (load.generated_tokens_total, load.prefilled_tokens_total)
        if progress == silence.progress:
            self._report_hang(link, silence, f"its engine computed no token for {self._stall_s:g} s")
            return
        silence.progress, silence.probing = progress, False
        silence.since_s += self._stall_s

    def _report_hang(self, link: WorkerLink, silence: _Silence, reason: str) -> None:
        if link.messages != silence.messages:
            return
        log.critical("a worker hangs", extra={"instance_id": link.instance_id, "reason": reason})
        self._metrics.hung_workers.inc()
        link.hung = True
        link.drop_requests("worker_hung", reason)


async def _ask_load(address: str) -> worker_pb2.LoadReport:
    async with open_channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        answer: worker_pb2.GetLoadResponse = await stub.GetLoad(worker_pb2.GetLoadRequest(), timeout=PROBE_DEADLINE_S)
        return answer.load
