"""The frontend as a role of the mesh."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import ClassVar

import httpx
from starlette.types import ASGIApp

from controlplane.model.autoscale_record import SCALES_PREFIX, ScaleRecord
from controlplane.protocols.recovery import RecoveryLimits
from mesh.identity.tls import transport_of
from mesh.membership import MemberChange
from mesh.role import WILDCARD_HOSTS, RoleContext
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet
from penstock.v1 import frontend_pb2_grpc
from services.frontend.cascade.cascades import Cascades
from services.frontend.cascade.judging import JudgeClient
from services.frontend.cascade.service import CascadeService
from services.frontend.console.actions import Operator
from services.frontend.console.collector import Collector
from services.frontend.console.feed import ConsoleFeed
from services.frontend.console.stories import Stories
from services.frontend.console.view import View
from services.frontend.console.window import Objectives
from services.frontend.http.app import create_app
from services.frontend.http.routes_console import Console
from services.frontend.http.server import EdgeLimits, HttpEndpoint, HttpServer
from services.frontend.http.tls import TlsFiles
from services.frontend.media.expander import Expander
from services.frontend.media.fetcher import MediaFetcher
from services.frontend.media.named import NamedMedia
from services.frontend.media.rules import MediaRules
from services.frontend.media.service import MediaService
from services.frontend.mesh_metrics import MeshMetrics
from services.frontend.metrics import FrontendMetrics
from services.frontend.parser_process.launcher import Launcher, ModuleLauncher
from services.frontend.parser_process.process import ParserProcess
from services.frontend.placement.client import PlacementClient
from services.frontend.placement.pooler import Pooler
from services.frontend.placement.waiting_room import WaitingRoom
from services.frontend.requests.adapter_loader import AdapterLoader
from services.frontend.requests.adapters import AdapterDirectory, serves_adapters
from services.frontend.requests.admission import AdmissionGate, AdmissionQueue
from services.frontend.requests.api_keys import KeyFile
from services.frontend.requests.background import BackgroundResponses
from services.frontend.requests.frontend_peers import FrontendPeers
from services.frontend.requests.jwks import JwksKeys
from services.frontend.requests.jwt_tokens import TokenRules, TokenVerifier
from services.frontend.requests.key_budgets import KeyBudgets
from services.frontend.requests.key_limits import KeyLimits
from services.frontend.requests.models import ModelCatalogue
from services.frontend.requests.service import FrontendService
from services.frontend.requests.shared_limits import SharedLimits
from services.frontend.requests.shared_responses import SharedResponses
from services.frontend.requests.stored_budgets import StoredBudgets
from services.frontend.requests.usage import Price, UsageFile, UsageLog
from services.frontend.settings import FrontendSettings
from services.frontend.status_servicer import FrontendServicer
from services.frontend.workers.liveness import LivenessMonitor
from services.frontend.workers.pool import WorkerPool

log = logging.getLogger(__name__)


class FrontendRole:
    """The OpenAI-compatible endpoint. Finds workers and schedulers in the directory by itself."""

    name: ClassVar[str] = "frontend"

    def __init__(
        self,
        settings: FrontendSettings,
        make_http: Callable[[ASGIApp, str, int], HttpEndpoint] | None = None,
        launcher: Launcher | None = None,
        media_http: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`make_http` serves an application at host and port, by default over TCP within the settings' bounds;
        `launcher` starts the process with vLLM's parsers, where a model needs it; `media_http` is how images are
        fetched, by default over the network."""
        self._launcher = ModuleLauncher() if launcher is None else launcher
        self._settings = settings
        self._make_http = make_http or self._serve_http
        self._media_http = media_http
        self._tasks = TaskSet(self.name)
        self._jwks: JwksKeys | None = None
        self._peers: FrontendPeers | None = None
        self._failure: asyncio.Future[None] | None = None
        self.service: FrontendService | None = None
        """Set by `start`, as `cascade` and `console`."""
        self.cascade: CascadeService | None = None
        self.console: Console | None = None
        """None too where there is none."""
        self._http: HttpEndpoint | None = None
        self._http_address = ""
        self._unsubscribe: list[Callable[[], None]] = []

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self.service is not None:
            self.service.pool.validate()
            self.service.budgets.budgets.validate()
            self.service.background.validate()
            for link in self.service.placement.links():
                link.breaker.validate()
            for generation in self.service.running.values():
                generation.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve HTTP; returns the address to announce. Raises ConfigurationError for a taken port or a bad key
        file."""
        self._failure = asyncio.get_running_loop().create_future()
        scales = StoredFolder(context.store, SCALES_PREFIX, ScaleRecord, ScaleRecord.checked)
        service = self.service = self._build(context, scales.records)
        adapters = service.catalogue.adapters
        judging = JudgeClient(
            self._settings.judge_deadline_s, context.runtime.transport, service.metrics.cascade.untold
        )
        cascade = self.cascade = CascadeService(service, Cascades(context.store), judging)
        loader = AdapterLoader(
            context.store,
            adapters,
            lambda name: service.catalogue.is_model(name) or name in cascade.cascades.records,
            context.runtime.transport,
            context.runtime.clock.unix_s,
        )
        console = self.console = self._build_console(context) if self._settings.console else None
        self._http = self._make_http(
            create_app(cascade, loader, console), self._settings.http_host, self._settings.http_port
        )
        http_address = self._http_address = _reachable(self._http.address, context)
        servicer = FrontendServicer(service, lambda: self._http_address)
        context.server.add(frontend_pb2_grpc.add_FrontendServicer_to_server, servicer, "penstock.v1.Frontend")
        peers = self._peers
        assert peers is not None, "it was built with the service"
        followers: tuple[Callable[[MemberChange], None], ...] = (
            service.catalogue.on_change,
            service.pool.on_change,
            service.placement.on_change,
            judging.on_change,
            peers.on_change,
            service.mesh_metrics.on_change,
            lambda change: self._follow_own(context, change),
        )
        self._unsubscribe = [context.directory.subscribe(follower) for follower in followers]
        self._tasks.spawn(cascade.cascades.follow(), name="follow the cascades", on_error=self._on_failed)
        self._tasks.spawn(adapters.follow(), name="follow the adapters", on_error=self._on_failed)
        self._tasks.spawn(scales.follow(), name="follow the scales", on_error=self._on_failed)
        if service.usage is not None:
            self._tasks.spawn(service.usage.write(), name="write usage", on_error=self._on_failed)
        if self._settings.api_keys_file is not None:
            keys = KeyFile(self._settings.api_keys_file)
            service.keys = keys.ring
            following = service.follow_keys(keys, context.runtime.clock.sleep)
            self._tasks.spawn(following, name="follow the keys", on_error=self._on_failed)
        if service.keys is not None or service.tokens is not None:
            telling = service.shared_limits.tell(context.runtime.clock.sleep)
            self._tasks.spawn(telling, name="tell what keys take", on_error=self._on_failed)
            self._tasks.spawn(service.budgets.follow(), name="follow the budgets", on_error=self._on_failed)
            writing = service.budgets.write(context.runtime.clock.sleep)
            self._tasks.spawn(writing, name="write what budgets are used", on_error=self._on_failed)
        self._http.start(self._tasks, self._on_failed)
        log.info("serving HTTP", extra={"http_address": self._http.address})
        return {"http_address": http_address, **({"tls": "true"} if self._settings.tls_certificate else {})}

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Close the port; return when all requests have ended, those that still arrive over kept connections, too."""
        if self.console is not None:
            self.console.feed.close()  # its viewers go to another frontend: they are no requests to wait for
        if self._http is not None:
            await self._http.drain()
        if self.service is not None:
            await self.service.background.drained()

    async def stop(self) -> None:
        """End what still runs with an error that says why, and close every connection."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()
        if self.service is not None:
            self.service.end_all()
        if self.console is not None:
            await self.console.feed.stop()
            await self.console.operator.collector.stop()
        if self._http is not None:
            await self._http.stop()
        if self.cascade is not None:
            await self.cascade.judging.stop()
        if self.service is not None:
            await self.service.background.stop()
            await self.service.stop_recoveries()
            await self.service.pooler.stop()
            await self.service.media.stop()
            await self.service.placement.stop()
            await self.service.pool.stop()
            await self.service.catalogue.stop()
            await self.service.parser_process.stop()
            await self.service.responses.stop()
            await self.service.mesh_metrics.stop()
        await self._tasks.cancel()
        if self.service is not None:
            await self.service.shared_limits.stop()
            await self.service.budgets.stop()
        if self._peers is not None:
            await self._peers.stop()
        if self._jwks is not None:
            await self._jwks.stop()
        if self.service is not None and self.service.usage is not None:
            await self.service.usage.stop()

    def _serve_http(self, app: ASGIApp, host: str, port: int) -> HttpServer:
        settings, service = self._settings, self.service
        assert service is not None, "it is built before its endpoint"
        tls = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            tls = TlsFiles(settings.tls_certificate, settings.tls_key)
        closed = service.metrics.closed_connections
        limits = EdgeLimits(
            settings.max_connections,
            settings.header_timeout_s,
            settings.max_header_bytes,
            lambda reason: closed.labels(reason).inc(),
        )
        server = HttpServer(app, host, port, limits, tls, settings.shared_http_port)
        service.metrics.connections.set_function(lambda: server.connections)
        return server

    def _build(self, context: RoleContext, scales: Mapping[str, ScaleRecord]) -> FrontendService:
        settings, runtime = self._settings, context.runtime
        clock = runtime.clock.now_s
        metrics = FrontendMetrics(context.registry)
        peers = self._peers = FrontendPeers(context.member_id, runtime.transport)
        key_limits, budgets = KeyLimits(), KeyBudgets(context.incarnation_id)
        metrics.unwritten_budgets.set_function(lambda: len(budgets))
        pool = WorkerPool(
            context.member_id,
            metrics,
            clock,
            runtime.transport,
            self._on_failed,
            LivenessMonitor(settings.freeze_s, settings.stall_s),
        )
        placement = PlacementClient(
            lambda request: [
                link.instance_id
                for link in pool.connected(request.model)
                if not request.adapter_digest or serves_adapters(link.member)
            ],
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
        parser_process = ParserProcess(self._launcher, runtime.transport, runtime.threads, metrics)
        rules = MediaRules(settings.max_media_bytes, settings.allowed_media_domains, settings.allowed_local_media_path)
        queue = AdmissionQueue(settings.max_running_requests, settings.max_queued_requests)
        responses = SharedResponses(settings.max_stored_response_bytes, peers, metrics)
        return FrontendService(
            settings=settings,
            metrics=metrics,
            mesh_metrics=MeshMetrics(
                context.member_id,
                context.registry,
                metrics.unread_members,
                runtime.transport,
                runtime.threads,
                clock,
            ),
            catalogue=ModelCatalogue(
                settings.tokenizer_cache_bytes,
                runtime.clock,
                runtime.threads,
                runtime.transport,
                AdapterDirectory(context.store),
                parser_process,
            ),
            pool=pool,
            placement=placement,
            gate=AdmissionGate(queue, clock, metrics),
            room=room,
            keys=None,
            tokens=self._token_verifier(context),
            clock=clock,
            unix_time=runtime.clock.unix_s,
            entropy=runtime.entropy,
            threads=runtime.threads,
            pooler=pooler,
            parser_process=parser_process,
            media=MediaService(
                MediaFetcher(rules, settings.media_fetch_timeout_s, runtime.threads, self._media_http),
                Expander(pool, runtime.transport, clock),
                NamedMedia(settings.max_named_media_bytes),
                settings.max_media_bytes,
                settings.max_held_media_bytes,
                settings.instance_wait_s,
                metrics,
                clock,
                runtime.threads,
            ),
            key_limits=key_limits,
            shared_limits=SharedLimits(key_limits, context.incarnation_id, peers),
            budgets=StoredBudgets(budgets, context.store, runtime.clock.unix_s),
            responses=responses,
            background=BackgroundResponses(
                responses,
                peers,
                (context.member_id, context.incarnation_id),
                settings.max_stored_response_bytes,
                settings.request_deadline_s,
                clock,
                metrics,
            ),
            scales=scales,
            tracer=context.tracer,
            audit=context.audit,
            usage=self._usage_log(context, metrics),
        )

    def _token_verifier(self, context: RoleContext) -> TokenVerifier | None:
        """Raises ConfigurationError for an address of keys that strangers may change."""
        settings = self._settings
        if not settings.jwt_issuer:
            return None
        rules = TokenRules(
            settings.jwt_issuer,
            settings.jwt_audience,
            settings.jwt_leeway_s,
            settings.jwt_tenant_claim,
            settings.jwt_scope,
            settings.jwt_operator_scope,
        )
        self._jwks = JwksKeys(settings.jwt_issuer, context.runtime.clock.now_s, jwks_url=settings.jwt_jwks_url)
        return TokenVerifier(rules, self._jwks.find, context.runtime.clock.unix_s)

    def _usage_log(self, context: RoleContext, metrics: FrontendMetrics) -> UsageLog | None:
        """Raises ConfigurationError for a folder that cannot be written to, and for prices that are none."""
        settings = self._settings
        prices = dict(map(Price.parse, settings.price))
        if settings.usage_folder is None:
            return None
        path = settings.usage_folder / f"{context.member_id.replace('/', '--')}.jsonl"
        file = UsageFile(path, settings.max_usage_file_bytes, settings.usage_files)
        return UsageLog(file, prices, context.runtime.threads, metrics.lost_usage_records)

    def _build_console(self, context: RoleContext) -> Console:
        runtime, settings = context.runtime, self._settings
        collector = Collector(context.directory, context.store, runtime.transport, runtime.clock)
        view = View(Objectives(settings.slo_ttft_ms, settings.slo_tpot_ms))
        feed = ConsoleFeed(collector, view, runtime.clock, runtime.threads)
        stories = Stories(collector, runtime.clock)
        if settings.console_identity:
            # With channels of its own: those of the looks are the frontend's.
            transport = transport_of(settings.console_identity, "operator")
            collector = Collector(context.directory, context.store, transport, runtime.clock)
        return Console(feed, stories, Operator(collector))

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
