"""The three stores as the conformance suite sees them."""

from collections.abc import Sequence
from typing import Protocol

import aetcd
import grpc

from mesh.rpc.limits import SERVER_OPTIONS
from mesh.runtime import SystemClock, SystemEntropy, system_runtime
from mesh.store import StateStore
from mesh.store.embedded import EmbeddedStore
from mesh.store.etcd import EtcdStore
from mesh.store.host import StoreHost
from mesh.store.remote import RemoteStore
from mesh.store.service import StateService
from penstock.v1 import state_pb2_grpc
from tests.mesh.running_mesh import free_port
from tests.mesh.store.etcd_process import EtcdProcess
from tests.mesh.store.manual_clock import ManualClock


class Backend(Protocol):
    def store(self, endpoints: Sequence[str] = ()) -> StateStore:
        """Another client of the same store, perhaps by way of a proxy."""

    async def let_expire(self, ttl_s: float) -> None:
        """Called when leases of this ttl that nobody keeps alive shall end; real time need not be helped."""

    async def compact(self, revision: int) -> None: ...

    async def end_lease(self, incarnation_id: str) -> None:
        """End a lease behind its holder's back."""

    async def close(self) -> None: ...


class EmbeddedBackend:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.host = StoreHost(self.clock, SystemEntropy())
        self._store = EmbeddedStore(self.host)

    def store(self, endpoints: Sequence[str] = ()) -> StateStore:
        return self._store

    async def let_expire(self, ttl_s: float) -> None:
        await self.clock.advance(ttl_s)

    async def compact(self, revision: int) -> None:
        self.host.compact(revision)

    async def end_lease(self, incarnation_id: str) -> None:
        self.host.revoke_lease(incarnation_id)
        await self.clock.advance(1.0)

    async def close(self) -> None:
        await self._store.close()


class RemoteBackend:
    def __init__(self, host: StoreHost | None = None) -> None:
        self.host = host or StoreHost(SystemClock(), SystemEntropy())
        self.port = free_port()
        self._server: grpc.aio.Server | None = None
        self._stores: list[StateStore] = []

    async def start(self) -> None:
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        state_pb2_grpc.add_StateServicer_to_server(StateService(self.host), self._server)
        self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def kill(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def lose_data(self) -> None:
        self.host.close()
        self.host = StoreHost(SystemClock(), SystemEntropy(), start_revision=1)

    def store(self, endpoints: Sequence[str] = ()) -> StateStore:
        self._stores.append(RemoteStore(endpoints[0] if endpoints else f"127.0.0.1:{self.port}", system_runtime()))
        return self._stores[-1]

    async def let_expire(self, ttl_s: float) -> None:
        return

    async def compact(self, revision: int) -> None:
        self.host.compact(revision)

    async def end_lease(self, incarnation_id: str) -> None:
        self.host.revoke_lease(incarnation_id)

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
        await self.kill()
        self.host.close()


class EtcdBackend:
    def __init__(self, process: EtcdProcess) -> None:
        self.process = process
        self.port = process.port
        self._stores: list[StateStore] = []

    async def start(self) -> None:
        self.process.start()

    async def kill(self) -> None:
        self.process.kill()

    async def lose_data(self) -> None:
        self.process.data = self.process.directory / "empty"

    def store(self, endpoints: Sequence[str] = ()) -> StateStore:
        self._stores.append(EtcdStore(endpoints or [self.process.endpoint], system_runtime()))
        return self._stores[-1]

    async def let_expire(self, ttl_s: float) -> None:
        return

    async def compact(self, revision: int) -> None:
        async with aetcd.Client(port=self.port) as client:
            await client.compact(revision, physical=True)

    async def end_lease(self, incarnation_id: str) -> None:
        async with aetcd.Client(port=self.port) as client:
            await client.revoke_lease(int(incarnation_id, 16))

    async def close(self) -> None:
        for store in self._stores:
            await store.close()
