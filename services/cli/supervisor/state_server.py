"""The embedded state store, served to the processes of a local mesh from the supervisor's own."""

from pathlib import Path
from typing import Final, Self

from mesh.rpc.server import RpcServer
from mesh.runtime import Runtime
from mesh.store.disk import Disk
from mesh.store.host import StoreHost
from mesh.store.service import StateService
from penstock.v1 import state_pb2_grpc

ANY_PORT: Final = "127.0.0.1:0"


class StateServer:
    """A store host behind a gRPC port of its own."""

    def __init__(self, host: StoreHost, server: RpcServer) -> None:
        self.host = host
        self._server = server
        self.url = f"penstock://{server.address}"

    @classmethod
    async def start(
        cls, runtime: Runtime, path: Path | None, disk: Disk | None = None, address: str = ANY_PORT
    ) -> Self:
        """Serve a store at `address`; its lasting keys are kept in `path`, if there is one. `disk`: what that is on;
        None: the machine's."""
        host = StoreHost(runtime.clock, runtime.entropy, path, disk=disk)
        server = RpcServer(runtime.transport, address)
        service = StateService(host, asks_who_writes=runtime.transport.identity is not None)
        server.add(state_pb2_grpc.add_StateServicer_to_server, service, "penstock.v1.State")
        await server.start()
        await server.set_serving(True)
        return cls(host, server)

    async def stop(self) -> None:
        """Stop serving; watches are cut."""
        self.host.close()
        await self._server.stop(0.2)
