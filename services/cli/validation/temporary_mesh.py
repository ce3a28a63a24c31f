"""A mesh of one's own to compare with, for as long as a block lasts."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from mesh.errors import PeerUnavailable
from services.cli.chaos.temporary_mesh import TemporaryMesh
from services.cli.chaos.temporary_mesh import temporary_mesh as running_mesh
from services.cli.validation.live import LiveMesh

READY_TIMEOUT_S = 600.0


@contextmanager
def temporary_mesh(engine: Literal["simulated", "vllm"], workers: int) -> Iterator[LiveMesh]:
    """Bring it up, end it after the block. Raises `PeerUnavailable` if it does not come up.

    It is looked after on a loop of its own: what runs in the block has loops of its own as well.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="own-mesh", daemon=True)
    thread.start()
    holder = running_mesh(TemporaryMesh(engine, workers), READY_TIMEOUT_S)
    try:
        mesh = asyncio.run_coroutine_threadsafe(holder.__aenter__(), loop).result()
        try:
            yield LiveMesh(mesh.http_url, mesh.store_url, "default")
        finally:
            asyncio.run_coroutine_threadsafe(holder.__aexit__(None, None, None), loop).result()
    except TimeoutError as error:
        raise PeerUnavailable(f"the mesh does not serve after {READY_TIMEOUT_S:g} s") from error
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
