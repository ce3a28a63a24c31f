"""A stream to another process that is opened again, with bounded back-off, whenever it ends."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from mesh.backoff import Backoff
from mesh.errors import PeerUnavailable, PenstockError
from mesh.rpc.client import open_channel, rpc_error
from mesh.rpc.outbox import Outbox
from mesh.runtime import Transport

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
HEALTHY_S: Final = 10.0
"""A stream that lived this long resets the back-off."""
LEFT: Final = "left for another address"

Out = TypeVar("Out")
In = TypeVar("In")


@dataclass(frozen=True, slots=True)
class StreamHandlers(Generic[In]):
    """What the owner of a stream wants to hear. Called on the event loop, must not block."""

    on_open: Callable[[], None]
    """The stream is open and messages may be sent."""
    on_message: Callable[[In], None]
    """Raises PenstockError to have the stream closed and opened again."""
    on_lost: Callable[[str], None]
    """It ended, for this reason; called once for each `on_open`."""


class PeerStream(Generic[Out, In]):
    """Keeps one stream open to a peer: owns the channel, and dials again with back-off whenever the stream breaks."""

    def __init__(
        self,
        peer: str,
        address: str,
        transport: Transport,
        method: Callable[[grpc.aio.Channel], Any],
        handlers: StreamHandlers[In],
        role: str = "",
    ) -> None:
        """`method` makes the multi-callable of a bidirectional method from a channel; `peer` names the other
        side in logs and errors, `role` says whom `open_channel` may reach."""
        self._peer = peer
        self._role = role
        self._address = address
        self._transport = transport
        self._method = method
        self._handlers = handlers
        self._outbox: Outbox[Out] | None = None
        self._leave = asyncio.Event()
        """The stream, or the attempt at one, is to be given up for one to another address."""
        self._call: Any = None
        self.channel: grpc.aio.Channel | None = None
        """To the peer, while `run` runs: other calls to it may share the connection."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent now."""
        return self._outbox is not None

    @property
    def transport_name(self) -> str:
        """What carries the stream: unix or grpc; empty while there is none."""
        return getattr(self._call, "transport_name", "grpc") if self._outbox is not None else ""

    def send(self, message: Out) -> None:
        """Queue a message. Raises PeerUnavailable while the stream is down."""
        if self._outbox is None:
            raise PeerUnavailable(f"{self._peer} at {self._address} is not connected")
        self._outbox.put(message)

    def readdress(self, address: str) -> None:
        """The peer is to be found elsewhere from now on. A stream that is open stays as long as it lives, or until
        `reconnect`."""
        self._address = address
        if self._outbox is None:
            self._leave.set()

    def reconnect(self) -> None:
        """Leave the stream that is open, for a new one to the address of now."""
        self._leave.set()

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        backoff = Backoff()
        while True:
            address = self._address
            channel = self.channel = open_channel(self._transport, address, self._role)
            try:
                while address == self._address:
                    await self._one_stream(channel, address, backoff)
            finally:
                self.channel = None
                await channel.close()

    async def _one_stream(self, channel: grpc.aio.Channel, address: str, backoff: Backoff) -> None:
        """Open a stream, read it to its end, and pause."""
        clock = asyncio.get_running_loop().time
        opened_s = clock()
        self._leave.clear()
        reason = await self._until_lost(channel)
        log.warning("stream lost", extra={"peer": self._peer, "address": address, "reason": reason})
        if self._leave.is_set() or clock() - opened_s >= HEALTHY_S:
            backoff.reset()
        if not self._leave.is_set():
            await self._unless_left(asyncio.sleep(backoff.next_s()))

    async def _until_lost(self, channel: grpc.aio.Channel) -> str:
        """Open a stream and read it to its end; returns why it ended."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if not await self._unless_left(channel.channel_ready()):
                    return LEFT
        except TimeoutError:
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        outbox = self._outbox = Outbox[Out](self._peer)
        call = self._call = self._method(channel)(outbox)
        reason = "closed here"
        try:
            self._handlers.on_open()
            reason = "the peer ended it" if await self._unless_left(self._read(call)) else LEFT
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, self._peer))
        except PenstockError as error:
            reason = str(error)
        finally:
            self._outbox = self._call = None
            outbox.close()
            call.cancel()
            self._handlers.on_lost(reason)
        return reason

    async def _read(self, call: Any) -> None:
        on_message = self._handlers.on_message
        async for message in call:
            on_message(message)

    async def _unless_left(self, work: Coroutine[Any, Any, None]) -> bool:
        """False if the work was given up because the stream is to be left. Raises what the work raises."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(self._leave.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
            return working.done()
        finally:
            leaving.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait((working,))
            if not working.cancelled():
                working.exception()  # it may have failed in the very moment in which we were cancelled
