"""A state store for processes that a test starts: the embedded one behind its gRPC port, on a thread of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh.identity.tls import transport_of
from mesh.runtime import system_runtime
from services.cli.supervisor.state_server import StateServer


@contextmanager
def served_state_store(identities: Path) -> Iterator[str]:
    """Serve a store meanwhile to who has an identity of that folder's authority; yields its URL."""
    runtime = system_runtime(transport_of(str(identities), "store"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(StateServer.start(runtime, None), loop).result(10)
    try:
        yield server.url
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
