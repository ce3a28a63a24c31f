"""What KV blocks travel over: the network of a `KvTransferAgent`, as UCX offers it and as a simulation does."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from engine_worker.kv.memory import Buffer


class KvEndpoint(Protocol):
    """One end of a connection between two agents.

    Every operation is a future that fails with `ConnectionError` and must not be cancelled: the buffer belongs to the
    fabric until the future is done. After `close`, or when the peer is lost, each operation still completes, with an
    error unless it was complete before.
    """

    def send(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """Done when the buffer may be used again. Messages of one tag keep their order."""

    def receive(self, buffer: Buffer, tag: int, *, is_data: bool = False) -> asyncio.Future[None]:
        """The next message of this tag, which may be shorter than the buffer. A tag belongs to the whole fabric, not
        to the endpoint: what comes before it is asked for is kept."""

    def send_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """Send bytes on the endpoint's ordered, untagged stream."""

    def receive_stream(self, buffer: Buffer) -> asyncio.Future[None]:
        """Exactly as many untagged bytes as the buffer has."""

    def close(self) -> None:
        """Abruptly; nothing is flushed. No effect the second time."""


class KvListener(Protocol):
    """Accepts connections for as long as it is referred to."""

    @property
    def port(self) -> int:
        """The TCP port at which peers connect."""


class KvFabric(Protocol):
    """One per agent; everything on one event loop."""

    def listen(self, port: int, accept: Callable[[KvEndpoint], None]) -> KvListener:
        """Call `accept` for each peer that connects; port 0 takes a free one. Raises `ConfigurationError` if the port
        is taken."""

    async def connect(self, host: str, port: int) -> KvEndpoint:
        """Begin to connect; the first operation fails if nobody is there. Raises `PeerUnavailable` for a host that
        has no address."""

    def staleness(self) -> str:
        """Why a fabric that is made now would reach peers that this one does not; empty if it would not."""

    async def jam(self) -> str:
        """Why a fabric that is made now would hear peers that this one does not; empty if it would not. Costs
        milliseconds of CPU: to be asked in doubt."""

    def obstacle(self) -> str:
        """Why no fabric of this process reaches new peers any more; empty if one can. Connections go on."""

    async def close(self) -> None:
        """After all endpoints; returns when no buffer is touched any more."""
