from collections.abc import AsyncIterator

import pytest

from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from tests.unit.services.operator.fake_api_server import FakeApiServer
from tests.unit.services.operator.mesh_on_cluster import Mesh


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    host = StoreHost(SystemClock(), SystemEntropy())
    store = EmbeddedStore(host)
    server = FakeApiServer()
    async with server.serve():
        yield Mesh(server, store)
    await store.close()
    host.close()
