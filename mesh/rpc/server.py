"""The gRPC server that every role runs: reflection and health on its one port, metrics for every method."""

from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mesh.errors import ConfigurationError
from mesh.rpc.limits import SERVER_OPTIONS
from mesh.rpc.metrics import RpcMetrics
from mesh.runtime import Transport


class RpcServer:
    """Add servicers, then start. The port is bound at construction, so that `address` can be announced before
    the first call is answered."""

    def __init__(self, transport: Transport, bind: str = "127.0.0.1:0", *, metrics: RpcMetrics | None = None) -> None:
        """`bind` is host:port; port 0 takes a free one. Raises ConfigurationError if it cannot be bound."""
        host = bind.rpartition(":")[0]
        interceptors = [metrics] if metrics else []
        self._server = transport.server(options=SERVER_OPTIONS, interceptors=interceptors)
        try:
            bound = self._server.add_insecure_port(bind)
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {bind}: is the address one of this machine, and its port free?"
            ) from error
        self.address = f"{host}:{bound}"
        self._services: list[str] = []
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(self, add_servicer: Callable[[Any, grpc.aio.Server], None], servicer: Any, full_name: str) -> None:
        """Serve `full_name` (such as penstock.v1.Worker) by `servicer`; before `start`."""
        add_servicer(servicer, self._server)
        self._services.append(full_name)

    async def start(self) -> str:
        """Answer calls; health is NOT_SERVING until `set_serving`. Returns the address."""
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self.set_serving(False)
        await self._server.start()
        return self.address

    async def set_serving(self, serving: bool) -> None:
        """Health of the process ("") and of each of its services."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *self._services):
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, let running ones end within `grace_s`, then cut them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
