"""A stream to another process that is opened again, with bounded back-off, whenever it ends."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import grpc

from mesh.errors import PeerUnavailable, PenstockError
from mesh.rpc.client import open_channel, rpc_error
from mesh.runtime import Transport

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
FIRST_BACKOFF_S: Final = 0.05
LONGEST_BACKOFF_S: Final = 1.0
HEALTHY_S: Final = 10.0
"""A stream that lived this long resets the back-off."""
MAX_OUTBOX_MESSAGES: Final = 8192

Out = TypeVar("Out")
In = TypeVar("In")


class Outbox(Generic[Out]):
    """Messages to be written, in order; read by gRPC through `messages`."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._messages: deque[Out] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: Out) -> None:
        """Raises PeerUnavailable if the peer has long stopped reading."""
        if len(self._messages) >= MAX_OUTBOX_MESSAGES:
            raise PeerUnavailable(f"{self._peer} does not read: {MAX_OUTBOX_MESSAGES} messages wait for it")
        self._messages.append(message)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def messages(self) -> AsyncIterator[Out]:
        """All messages, as they are put; never ends by itself."""
        while True:
            while self._messages:
                yield self._messages.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


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
    """Owns the channel to one peer and, over time, one stream after another on it."""

    def __init__(
        self,
        peer: str,
        address: str,
        transport: Transport,
        method: Callable[[grpc.aio.Channel], Any],
        handlers: StreamHandlers[In],
    ) -> None:
        """`method` makes the multi-callable of a bidirectional method from a channel; `peer` names the other
        side in logs and errors."""
        self._peer = peer
        self._address = address
        self._transport = transport
        self._method = method
        self._handlers = handlers
        self._outbox: Outbox[Out] | None = None
        self.channel: grpc.aio.Channel | None = None
        """To the peer, while `run` runs: other calls to it may share the connection."""

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent now."""
        return self._outbox is not None

    def send(self, message: Out) -> None:
        """Queue a message. Raises PeerUnavailable while the stream is down."""
        if self._outbox is None:
            raise PeerUnavailable(f"{self._peer} at {self._address} is not connected")
        self._outbox.put(message)

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        channel = self.channel = open_channel(self._transport, self._address)
        clock = asyncio.get_running_loop().time
        backoff_s = FIRST_BACKOFF_S
        try:
            while True:
                opened_s = clock()
                reason = await self._one_stream(channel)
                log.warning("stream lost", extra={"peer": self._peer, "address": self._address, "reason": reason})
                healthy = clock() - opened_s >= HEALTHY_S
                backoff_s = FIRST_BACKOFF_S if healthy else min(LONGEST_BACKOFF_S, 2 * backoff_s)
                await asyncio.sleep(backoff_s)
        finally:
            self.channel = None
            await channel.close()

    async def _one_stream(self, channel: grpc.aio.Channel) -> str:
        """Open a stream and read it to its end; returns why it ended."""
        try:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
        except TimeoutError:
            return f"no connection within {CONNECT_TIMEOUT_S:g} s"
        outbox = self._outbox = Outbox[Out](self._peer)
        call = self._method(channel)(outbox.messages())
        reason = "closed here"
        try:
            self._handlers.on_open()
            on_message = self._handlers.on_message
            async for message in call:
                on_message(message)
            reason = "the peer ended it"
        except grpc.aio.AioRpcError as error:
            reason = str(rpc_error(error, self._peer))
        except PenstockError as error:
            reason = str(error)
        finally:
            self._outbox = None
            call.cancel()
            self._handlers.on_lost(reason)
        return reason
