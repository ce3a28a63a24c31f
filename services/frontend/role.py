"""The frontend as a role of the mesh."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import ClassVar

from starlette.types import ASGIApp

from controlplane.protocols.recovery import RecoveryLimits
from mesh.membership import MemberChange
from mesh.role import WILDCARD_HOSTS, RoleContext
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2_grpc
from services.frontend.cascade.cascades import Cascades
from services.frontend.cascade.judging import JudgeClient
from services.frontend.cascade.service import CascadeService
from services.frontend.http.app import create_app
from services.frontend.http.server import HttpEndpoint, HttpServer
from services.frontend.metrics import FrontendMetrics
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.pooler import Pooler
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.admission import AdmissionGate, AdmissionQueue
from services.frontend.requests.api_keys import KeyRing
from services.frontend.requests.models import ModelCatalogue
from services.frontend.requests.service import FrontendService
from services.frontend.settings import FrontendSettings
from services.frontend.status_servicer import FrontendServicer
from services.frontend.workers.liveness import LivenessMonitor
from services.frontend.workers.pool import WorkerPool

log = logging.getLogger(__name__)


class FrontendRole:
    """The OpenAI-compatible endpoint. Finds workers and schedulers in the directory by itself."""

    name: ClassVar[str] = "frontend"

    def __init__(
        self, settings: FrontendSettings, make_http: Callable[[ASGIApp, str, int], HttpEndpoint] = HttpServer
    ) -> None:
        """`make_http` serves an application at host and port."""
        self._settings = settings
        self._make_http = make_http
        self._tasks = TaskSet(self.name)
        self._failure: asyncio.Future[None] | None = None
        self.service: FrontendService | None = None
        """Set by `start`, as `cascade`."""
        self.cascade: CascadeService | None = None
        self._http: HttpEndpoint | None = None
        self._http_address = ""
        self._unsubscribe: list[Callable[[], None]] = []

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self.service is not None:
            self.service.pool.validate()
            for link in self.service.placement.links():
                link.breaker.validate()
            for generation in self.service.running.values():
                generation.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve HTTP; returns the address to announce. Raises ConfigurationError for a taken port or a bad key
        file."""
        self._failure = asyncio.get_running_loop().create_future()
        service = self.service = self._build(context)
        judging = JudgeClient(
            self._settings.judge_deadline_s, context.runtime.transport, service.metrics.cascade.untold
        )
        cascade = self.cascade = CascadeService(service, Cascades(context.store), judging)
        self._http = self._make_http(
            create_app(cascade, context.registry), self._settings.http_host, self._settings.http_port
        )
        http_address = self._http_address = _reachable(self._http.address, context)
        servicer = FrontendServicer(service, lambda: self._http_address)
        context.server.add(frontend_pb2_grpc.add_FrontendServicer_to_server, servicer, "penstock.v1.Frontend")
        followers: tuple[Callable[[MemberChange], None], ...] = (
            service.catalogue.on_change,
            service.pool.on_change,
            service.placement.on_change,
            judging.on_change,
            lambda change: self._follow_own(context, change),
        )
        self._unsubscribe = [context.directory.subscribe(follower) for follower in followers]
        self._tasks.spawn(cascade.cascades.follow(), name="follow the cascades", on_error=self._on_failed)
        self._http.start(self._tasks, self._on_failed)
        log.info("serving HTTP", extra={"http_address": self._http.address})
        return {"http_address": http_address}

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Close the port; return when all requests have ended, those that still arrive over kept connections, too."""
        if self._http is not None:
            await self._http.drain()

    async def stop(self) -> None:
        """End what still runs with an error that says why, and close every connection."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()
        if self.service is not None:
            self.service.end_all()
        if self._http is not None:
            await self._http.stop()
        if self.cascade is not None:
            await self.cascade.judging.stop()
        if self.service is not None:
            await self.service.pooler.stop()
            await self.service.placement.stop()
            await self.service.pool.stop()
            await self.service.catalogue.stop()
        await self._tasks.cancel()

    def _build(self, context: RoleContext) -> FrontendService:
        settings, runtime = self._settings, context.runtime
        clock = runtime.clock.now_s
        metrics = FrontendMetrics(context.registry)
        pool = WorkerPool(
            context.member_id,
            metrics,
            clock,
            runtime.transport,
            self._on_failed,
            LivenessMonitor(settings.freeze_s, settings.stall_s),
        )
        placement = PlacementClient(
            lambda model: [link.instance_id for link in pool.connected(model)],
            settings.placement_deadline_s,
            runtime.transport,
            metrics,
            self._on_failed,
            clock,
            context.member_id,
        )
        pool.on_links = placement.tell_workers
        room = WaitingRoom(settings.max_waiting_requests, metrics)
        limits = RecoveryLimits(settings.max_recoveries, settings.instance_wait_s)
        pooler = Pooler(pool, placement, limits, settings.connect_wait_s, room, metrics, runtime.transport, clock)
        queue = AdmissionQueue(settings.max_running_requests, settings.max_queued_requests)
        return FrontendService(
            settings=settings,
            metrics=metrics,
            catalogue=ModelCatalogue(
                settings.tokenizer_cache_characters, runtime.clock, runtime.threads, runtime.transport
            ),
            pool=pool,
            placement=placement,
            gate=AdmissionGate(queue, clock, metrics),
            room=room,
            keys=KeyRing.load(settings.api_keys_file) if settings.api_keys_file else None,
            clock=clock,
            unix_time=runtime.clock.unix_s,
            entropy=runtime.entropy,
            threads=runtime.threads,
            pooler=pooler,
            tracer=context.tracer,
        )

    def _follow_own(self, context: RoleContext, change: MemberChange) -> None:
        if context.is_own(change.member):
            self._http_address = change.member.attributes.get("http_address", self._http_address)

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)


def _reachable(http_address: str, context: RoleContext) -> str:
    """By others, too: a port that is open on all addresses is reached where the process itself is."""
    host, _, port = http_address.rpartition(":")
    return f"{context.address.rpartition(':')[0]}:{port}" if host in WILDCARD_HOSTS else http_address
