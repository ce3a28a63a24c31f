"""One end of one framed stream: its socket, what was read and is not taken yet, flow control and keep-alive."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from mesh.errors import PeerUnavailable, ProtocolViolation
from mesh.identity.contexts import names_in
from mesh.rpc.framed.frames import HEADER, FrameKind, FrameReader
from mesh.rpc.limits import KEEPALIVE_TIME_MS, MAX_MESSAGE_BYTES

WINDOW_BYTES: Final = 1 << 20
"""How much may be on its way unread in one direction. A message goes as a whole once the window is not full, so this
and one message are the most that either end keeps."""
FLUSH_BYTES: Final = 1 << 16
"""What is written in one turn of the event loop goes out together, unless it is more than this."""
PING_TIMEOUT_S: Final = 10.0
"""Longer than gRPC's: its threads answer a ping while the event loop is held up, here the event loop itself has to."""
FRAME_COST_BYTES: Final = 64
"""Of a message in the window, besides its length: messages of no bytes must not be without end."""


class FramedStream(asyncio.Protocol):
    """The messages both ways, and the frames around them.

    Several frames that come at once wake the reader once; several that are written in one turn of the loop are one
    write. The end of the socket, or a ping that is not answered, is told once by `on_lost`.
    """

    def __init__(
        self,
        on_control: Callable[[FrameKind, bytes], None],
        on_lost: Callable[[str], None],
        keepalive_s: float = KEEPALIVE_TIME_MS / 1000,
        ping_timeout_s: float = PING_TIMEOUT_S,
    ) -> None:
        """`on_control` gets the frames CALL, ACCEPT and STATUS, and may raise ProtocolViolation."""
        self._on_control = on_control
        self._on_lost = on_lost
        self._keepalive_s = keepalive_s
        self._ping_timeout_s = ping_timeout_s
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._inbox: deque[bytes] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._is_input_over = False
        self._inbox_bytes = 0
        self._read_unsaid_bytes = 0
        self._unread_bytes = 0
        """Sent, and not known to be read."""
        self._writers: deque[asyncio.Future[None]] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._is_flush_due = False
        self._heard_s = self._loop.time()
        self._pinged_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.takes_messages = False
        """The other end has shown who it is."""
        self.is_closed = False
        """Nothing can be sent any more."""

    @property
    def certificate_names(self) -> tuple[bytes, ...]:
        """In the certificate that the other end has shown on this connection; empty without TLS."""
        assert self._transport is not None, "it is connected"
        connection = self._transport.get_extra_info("ssl_object")
        return () if connection is None else names_in(connection)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio.Transport
        self._transport = transport  # type: ignore[assignment]
        if self.is_closed:
            transport.close()
            return
        self._timer = self._loop.call_later(self._keepalive_s, self._keep_alive)

    def data_received(self, data: bytes) -> None:
        if self.is_closed:
            return
        self._heard_s = self._loop.time()
        try:
            for kind, payload in self._frames.feed(data):
                if kind is FrameKind.MESSAGE:
                    self._take(payload)
                elif kind is FrameKind.WINDOW:
                    self._window_opened(payload)
                elif kind is FrameKind.HALF_CLOSE:
                    self.end_input()
                elif kind is FrameKind.PING:
                    self._answer_ping()
                elif kind is FrameKind.PONG:
                    self._pinged_s = None
                else:
                    self._on_control(kind, payload)
        except ProtocolViolation as error:
            self.abort(str(error))
            return
        if self._reader is not None and self._inbox and not self._reader.done():
            self._reader.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection has ended" if exc is None else f"the connection broke: {exc}")

    # -- reading

    async def read(self) -> bytes | None:
        """The next message; None when none will come any more."""
        while not self._inbox:
            if self._is_input_over:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        message = self._inbox.popleft()
        cost_bytes = len(message) + FRAME_COST_BYTES
        self._inbox_bytes -= cost_bytes
        self._read_unsaid_bytes += cost_bytes
        if self._read_unsaid_bytes >= WINDOW_BYTES // 2:
            self.send(FrameKind.WINDOW, self._read_unsaid_bytes.to_bytes(8, "big"))
            self._read_unsaid_bytes = 0
        return message

    @property
    def has_unread(self) -> bool:
        """Whether messages have come that nobody has read."""
        return bool(self._inbox)

    def end_input(self) -> None:
        """No message comes any more; those that have come can still be read."""
        self._is_input_over = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _take(self, message: bytes) -> None:
        self._inbox_bytes += len(message) + FRAME_COST_BYTES
        if not self.takes_messages or self._inbox_bytes > WINDOW_BYTES + MAX_MESSAGE_BYTES + FRAME_COST_BYTES:
            why = "more than its window allows" if self.takes_messages else "before it has said who it is"
            raise ProtocolViolation(f"the peer sends messages {why}")
        self._inbox.append(message)

    # -- writing

    async def write(self, message: bytes) -> None:
        """Send a message, once the other end has read enough of those before. Raises PeerUnavailable when the stream
        has ended, ProtocolViolation for a message that is too large."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise ProtocolViolation(f"a message of {len(message)} bytes; {MAX_MESSAGE_BYTES} are taken at most")
        while self._unread_bytes >= WINDOW_BYTES and not self.is_closed:
            writer = self._loop.create_future()
            self._writers.append(writer)
            await writer
        if self.is_closed:
            raise PeerUnavailable("the stream has ended")
        self._unread_bytes += len(message) + FRAME_COST_BYTES
        self.send(FrameKind.MESSAGE, message)

    def send(self, kind: FrameKind, payload: bytes = b"") -> None:
        """Queue a frame for the end of this turn of the loop; nothing happens on a stream that has ended."""
        if self.is_closed:
            return
        self._out += (HEADER.pack(len(payload), kind), payload)
        self._out_bytes += len(payload)
        if self._out_bytes >= FLUSH_BYTES:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush_due)

    def close(self) -> None:
        """Send what is queued, then close the socket; `on_lost` is not called. Messages that came can be read."""
        if not self.is_closed:
            self._flush()
            self._finish()
            if self._transport is not None:
                self._transport.close()

    def abort(self, reason: str) -> None:
        """Break it off; `on_lost` is told the reason."""
        transport = self._transport
        self._end(reason)
        if transport is not None:
            transport.abort()

    def _flush_due(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        if self._out and self._transport is not None:
            out, self._out, self._out_bytes = self._out, [], 0
            self._transport.write(b"".join(out))

    def _answer_ping(self) -> None:
        assert self._transport is not None, "it is connected"
        if self._transport.get_write_buffer_size() > WINDOW_BYTES + MAX_MESSAGE_BYTES:
            raise ProtocolViolation("the peer pings and reads no answer")
        self.send(FrameKind.PONG)

    def _window_opened(self, payload: bytes) -> None:
        self._unread_bytes -= int.from_bytes(payload, "big")
        if self._unread_bytes < 0 or len(payload) != 8:
            raise ProtocolViolation("the peer says that it has read more than it was sent")
        if self._unread_bytes < WINDOW_BYTES:
            self._wake_writers()

    def _wake_writers(self) -> None:
        while self._writers:
            writer = self._writers.popleft()
            if not writer.done():
                writer.set_result(None)

    # -- the end

    def _end(self, reason: str) -> None:
        if not self.is_closed:
            self._finish()
            self._on_lost(reason)

    def _finish(self) -> None:
        self.is_closed = True
        self._out.clear()
        if self._timer is not None:
            self._timer.cancel()
        self.end_input()
        self._wake_writers()

    def _keep_alive(self) -> None:
        """A ping when nothing was heard for the time, the end when it is not answered."""
        now_s = self._loop.time()
        if self._pinged_s is not None and self._heard_s <= self._pinged_s:
            due_s = self._pinged_s + self._ping_timeout_s
            if now_s >= due_s:
                self.abort(f"the peer has been silent for {now_s - self._heard_s:.0f} s and answers no ping")
                return
        else:
            self._pinged_s = None
            due_s = self._heard_s + self._keepalive_s
            if now_s >= due_s:
                self._pinged_s, due_s = now_s, now_s + self._ping_timeout_s
                self.send(FrameKind.PING)
        self._timer = self._loop.call_later(max(due_s - now_s, 0.01), self._keep_alive)
