"""A TCP proxy on loopback that a test can cut."""

import asyncio
from contextlib import suppress

from tests.mesh.running_mesh import free_port


class Proxy:
    """Forwards its port to another one of this machine until it is cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.port = free_port()
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def restore(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers |= {writer, far_writer}
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
            self._writers -= {writer, far_writer}
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    writer.close()
