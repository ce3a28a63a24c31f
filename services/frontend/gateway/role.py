"""The gateway as a role of the mesh."""

import asyncio
from collections.abc import Callable, Mapping
from typing import ClassVar, Final

from mesh.membership import MemberChange
from mesh.role import RoleContext
from mesh.rpc.server import RpcServer
from mesh.tasks import TaskSet
from penstock.v1 import ext_proc_pb2_grpc, gateway_pb2, gateway_pb2_grpc
from services.frontend.gateway.endpoints import Endpoint, Endpoints, resolve_host
from services.frontend.gateway.metrics import GatewayMetrics
from services.frontend.gateway.picker import Picker
from services.frontend.gateway.settings import GatewaySettings
from services.frontend.gateway.stream import GatewayService
from services.frontend.placement.client import PlacementClient
from services.frontend.requests.adapters import AdapterDirectory
from services.frontend.requests.models import ModelCatalogue
from services.frontend.status_servicer import scheduler_connection

EXTERNAL_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
READINESS: Final = "readiness"
LIVENESS: Final = "liveness"
"""These two are names of the endpoint picker's protocol."""
HEALTH_S: Final = 0.5
"""How often its health is said anew."""


class GatewayRole:
    """Finds schedulers and attached servers in the directory by itself."""

    name: ClassVar[str] = "gateway"

    def __init__(self, settings: GatewaySettings, resolve: Callable[[str], str] = resolve_host) -> None:
        """`resolve`: the address that a host's name stands for."""
        self._settings = settings
        self._resolve = resolve
        self._tasks = TaskSet(self.name)
        self._failure: asyncio.Future[None] | None = None
        self._unsubscribe: list[Callable[[], None]] = []
        self._is_draining = False
        self._server: RpcServer | None = None
        self.service: GatewayService | None = None
        """Set by `start`."""

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Serve Envoys on the role's own port; announces nothing besides."""
        self._failure = asyncio.get_running_loop().create_future()
        settings, runtime = self._settings, context.runtime
        metrics = GatewayMetrics(context.registry)
        adapters = AdapterDirectory(context.store)
        catalogue = ModelCatalogue(
            settings.tokenizer_cache_bytes,
            runtime.clock,
            runtime.threads,
            runtime.transport,
            adapters,
            reads_answers=False,
        )
        endpoints = Endpoints(runtime.threads, self._resolve)
        placement = PlacementClient(
            lambda request: [each.instance_id for each in endpoints.of(request.model)],
            settings.placement_deadline_s,
            runtime.transport,
            metrics,
            self._on_failed,
            runtime.clock.now_s,
            context.member_id,
        )
        endpoints.on_links = placement.tell_workers
        picker = Picker(settings, catalogue, endpoints, placement, metrics, runtime.threads, runtime.clock.now_s)
        service = self.service = GatewayService(picker, settings, metrics, runtime.clock, runtime.entropy)
        context.server.add(
            ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server,
            service,
            EXTERNAL_PROCESSOR,
        )
        context.server.add(
            gateway_pb2_grpc.add_GatewayServicer_to_server, GatewayStatusServicer(service), "penstock.v1.Gateway"
        )
        self._server = context.server
        context.server.name_health(READINESS)
        self._tasks.spawn(self._follow_health(endpoints, context.server), name="health", on_error=self._on_failed)
        followers: tuple[Callable[[MemberChange], None], ...] = (
            catalogue.on_change,
            endpoints.on_member,
            placement.on_change,
        )
        self._unsubscribe = [context.directory.subscribe(follower) for follower in followers]
        self._tasks.spawn(adapters.follow(), name="follow the adapters", on_error=self._on_failed)
        return {}

    async def failed(self) -> None:
        """Raises what made it impossible to go on."""
        assert self._failure is not None
        await asyncio.shield(self._failure)

    async def drain(self) -> None:
        """Return when no request passes any more. Its health tells Envoys to ask another one."""
        self._is_draining = True
        if self._server is not None:
            await self._server.set_serving(False)
        if self.service is not None:
            await self.service.idle()

    async def stop(self) -> None:
        """Refuse those that wait, and close every connection."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe.clear()
        if self.service is not None:
            picker = self.service.picker
            picker.room.is_closed = True
            picker.endpoints.wake()
            await picker.placement.stop()
            await picker.catalogue.stop()
            await picker.endpoints.stop()
        await self._tasks.cancel()

    async def _follow_health(self, endpoints: Endpoints, server: RpcServer) -> None:
        """Its service is not serving while it knows of no endpoint: an Envoy then does as well without it. Said anew
        now and then, because the process says it at its start."""
        await server.set_health(LIVENESS, True)
        while not self._is_draining:
            seen = endpoints.news
            is_ready = any(each.address for each in endpoints.all())
            for name in (EXTERNAL_PROCESSOR, READINESS):
                await server.set_health(name, is_ready)
            await endpoints.wait_for_news(seen, HEALTH_S)

    def _on_failed(self, error: BaseException) -> None:
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)


class GatewayStatusServicer(gateway_pb2_grpc.GatewayServicer):
    """Implements `penstock.v1.Gateway`, which `penstock status` asks."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service

    async def GetStatus(
        self, request: gateway_pb2.GetGatewayStatusRequest, context: object
    ) -> gateway_pb2.GetGatewayStatusResponse:
        """Endpoints, what is under way, and the fallback in force, if any."""
        service, picker = self._service, self._service.picker
        return gateway_pb2.GetGatewayStatusResponse(
            endpoints=[self._endpoint(each) for each in picker.endpoints.all()],
            active_streams=service.active,
            requests_total=service.requests_total,
            held_bytes=service.held_bytes,
            models=[model.name for model in picker.catalogue.served()],
            placement_fallback=picker.placement.fallback,
            schedulers=[scheduler_connection(link) for link in picker.placement.links()],
        )

    def _endpoint(self, endpoint: Endpoint) -> gateway_pb2.GatewayEndpoint:
        return gateway_pb2.GatewayEndpoint(
            instance_id=endpoint.instance_id,
            model=endpoint.model,
            endpoint=endpoint.address,
            requests=self._service.picker.endpoints.requests[endpoint.instance_id],
        )
