from collections.abc import AsyncIterator

import pytest

from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost


@pytest.fixture
async def store() -> AsyncIterator[EmbeddedStore]:
    host = StoreHost(SystemClock(), SystemEntropy())
    opened = EmbeddedStore(host)
    yield opened
    await opened.close()
    host.close()
