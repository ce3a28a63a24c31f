"""The gRPC server that every role runs: reflection and health on its one port, metrics for every method."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from mesh.errors import ConfigurationError
from mesh.rpc.garbage import GarbageGuard
from mesh.rpc.limits import SERVER_OPTIONS
from mesh.rpc.metrics import RpcMetrics
from mesh.runtime import Transport


class RpcServer:
    """Add servicers, then start. The port is bound at construction, so that `address` can be announced before
    the first call is answered."""

    def __init__(
        self,
        transport: Transport,
        bind: str = "127.0.0.1:0",
        *,
        metrics: RpcMetrics | None = None,
        watchers: Sequence[grpc.aio.ServerInterceptor] = (),
        on_health: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        """`bind` is host:port; port 0 takes a free one. `watchers` see each call that may be made. `on_health` is
        called with each name's health as it is set. Raises ConfigurationError if it cannot be bound."""
        host = bind.rpartition(":")[0]
        interceptors = [*([metrics] if metrics else []), *watchers, GarbageGuard()]
        self._server = transport.server(options=SERVER_OPTIONS, interceptors=interceptors)
        try:
            bound = transport.listen(self._server, bind)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {bind}: is the address one of this machine, and its port free?"
            ) from error
        self.address = f"{host}:{bound}"
        self._on_health = on_health
        self._services: list[str] = []
        self._health_names: list[str] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, add_servicer: Callable[[Any, grpc.aio.Server], None], servicer: Any, full_name: str) -> None:
        """Serve `full_name` (such as penstock.v1.Worker) by `servicer`; before `start`."""
        add_servicer(servicer, self._server)
        self._services.append(full_name)

    def name_health(self, name: str) -> None:
        """Tell the process's health under this name, too, which is no service; before `start`."""
        self._health_names.append(name)

    async def set_health(self, name: str, serving: bool) -> None:
        """Of one name, whatever that of the process is."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set(name, status)
        self._on_health(name, serving)

    async def start(self) -> str:
        """Answer calls; health is NOT_SERVING until `set_serving`. Returns the address."""
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        self._reflect(names)
        await self.set_serving(False)
        await self._server.start()
        return self.address

    def _reflect(self, names: tuple[str, ...]) -> None:
        """Under both names that clients ask for, newer ones for v1 first. The messages of the two have the same fields
        and numbers, and gRPC's package has only those of v1alpha, so v1 is not among the services that are listed."""
        servicer = reflection.aio.ReflectionServicer(names)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, self._server)
        info = grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        v1 = grpc.method_handlers_generic_handler("grpc.reflection.v1.ServerReflection", {"ServerReflectionInfo": info})
        self._server.add_generic_rpc_handlers((v1,))

    async def set_serving(self, serving: bool) -> None:
        """Health of the process ("") and of each of its services."""
        for name in ("", *self._services, *self._health_names):
            await self.set_health(name, serving)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end within `grace_s`, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
