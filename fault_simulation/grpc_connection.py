"""What both ends of a simulated gRPC connection have in common: frames, flow control and keep-alive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any, Final

from google.protobuf.message import Message

from fault_simulation.loop import VirtualLoop
from fault_simulation.network import Endpoint
from fault_simulation.node import Handle, Node

Metadata = tuple[tuple[str, str | bytes], ...]
Serializer = Callable[[Any], bytes]

WINDOW_BYTES: Final = 64 * 1024
"""HTTP/2's first window. gRPC opens it by what it measures, up to some MiB; the smallest is the hardest."""
FRAME_OVERHEAD_BYTES: Final = 32
DEFAULT_MAX_RECEIVE_BYTES: Final = 4 * 1024 * 1024
NEVER_MS: Final = 2**31 - 1


class Kind(IntEnum):
    """Frames. Each is a tuple that begins with its kind and, except the last four, the stream's number."""

    CALL = auto()
    """method, metadata, timeout_s | None, first message | None, whether it is the only one"""
    MESSAGE = auto()
    """message"""
    HALF_CLOSE = auto()
    """The client sends nothing more."""
    INITIAL = auto()
    """The server's initial metadata, where it is sent before any message."""
    STATUS = auto()
    """code, details, trailing metadata, last message | None"""
    CANCEL = auto()
    """The client gives the call up."""
    WINDOW = auto()
    """bytes that were read"""
    SETTINGS = auto()
    PING = auto()
    PONG = auto()
    GO_AWAY = auto()


def encoded(serialize: Serializer | None, message: Any) -> Any:
    """A message by its serializer, the entries of maps in the order of their keys: protobuf's own order is another one
    in each process, and frames are part of the digest of a simulation."""
    if isinstance(message, Message):
        return message.SerializeToString(deterministic=True)
    return message if serialize is None else serialize(message)


@dataclass(frozen=True, slots=True)
class Limits:
    """From the options of a channel or server."""

    max_send_bytes: int
    max_receive_bytes: int
    keepalive_s: float
    keepalive_timeout_s: float
    keepalive_without_calls: bool
    first_backoff_s: float
    shortest_attempt_s: float
    longest_backoff_s: float


def limits_of(options: Sequence[tuple[str, Any]], *, keepalive_without_calls: bool) -> Limits:
    """`options` as gRPC takes them; what is not there has gRPC's default."""
    given = dict(options)

    def size(name: str, default: int) -> int:
        value = int(given.get(name, default))
        return value if value >= 0 else 2**62

    timeout_ms = given.get("grpc.http2.ping_timeout_ms", given.get("grpc.keepalive_timeout_ms", 20_000))
    return Limits(
        max_send_bytes=size("grpc.max_send_message_length", -1),
        max_receive_bytes=size("grpc.max_receive_message_length", DEFAULT_MAX_RECEIVE_BYTES),
        keepalive_s=given.get("grpc.keepalive_time_ms", NEVER_MS) / 1000,
        keepalive_timeout_s=timeout_ms / 1000,
        keepalive_without_calls=keepalive_without_calls or bool(given.get("grpc.keepalive_permit_without_calls", 0)),
        first_backoff_s=given.get("grpc.initial_reconnect_backoff_ms", 1000) / 1000,
        shortest_attempt_s=given.get("grpc.min_reconnect_backoff_ms", 20_000) / 1000,
        longest_backoff_s=given.get("grpc.max_reconnect_backoff_ms", 120_000) / 1000,
    )


class GrpcConnection:
    """One end of an HTTP/2 connection. Frames that are not its own go to `on_frame`; `on_lost` is called once, when it
    breaks or a ping is not answered in time."""

    def __init__(
        self,
        loop: VirtualLoop,
        node: Node,
        endpoint: Endpoint,
        limits: Limits,
        on_frame: Callable[[tuple[Any, ...]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._node = node
        self._endpoint = endpoint
        self._limits = limits
        self._on_frame = on_frame
        self._on_lost: Callable[[str], None] | None = on_lost
        self._heard_s = loop.now_s
        self._pinged_s: float | None = None
        self._timer: Handle | None = None
        self.calls = 0
        """Under way; kept by the owner."""
        endpoint.receiver = self
        if limits.keepalive_s < NEVER_MS / 1000:
            self._timer = loop.call_in(node, limits.keepalive_s, self._keep_alive)

    @property
    def is_open(self) -> bool:
        """Whether frames may be sent."""
        return self._on_lost is not None

    def send(self, *frame: Any) -> None:
        """A frame without a message."""
        self._endpoint.send(frame)

    def send_message(self, message: bytes, *frame: Any) -> None:
        """A frame that has one."""
        self._endpoint.send(frame, len(message) + FRAME_OVERHEAD_BYTES)

    def close(self) -> None:
        """In order; the owner hears nothing of it."""
        self._end()
        self._endpoint.close()

    def received(self, frame: tuple[Any, ...]) -> None:
        """From the network."""
        self._heard_s = self._loop.now_s
        kind = frame[0]
        if kind is Kind.PING:
            self._endpoint.send((Kind.PONG,))
        elif kind is Kind.PONG:
            self._pinged_s = None
        else:
            self._on_frame(frame)

    def lost(self, reason: str) -> None:
        """From the network."""
        on_lost = self._on_lost
        self._end()
        if on_lost is not None:
            on_lost(reason)

    def _end(self) -> None:
        self._on_lost = None
        if self._timer is not None:
            self._timer.cancel()

    def _keep_alive(self) -> None:
        """As gRPC does: a ping when nothing was heard for the time, the end when it is not answered."""
        now_s, limits = self._loop.now_s, self._limits
        if self._pinged_s is not None:
            if now_s - self._pinged_s >= limits.keepalive_timeout_s - 1e-6:
                self._endpoint.close()
                self.lost("ping timeout: keepalive watchdog timeout")
                return
            next_s = self._pinged_s + limits.keepalive_timeout_s - now_s
        elif now_s - self._heard_s >= limits.keepalive_s - 1e-6 and (self.calls or limits.keepalive_without_calls):
            self._pinged_s = now_s
            self._endpoint.send((Kind.PING,))
            next_s = limits.keepalive_timeout_s
        else:
            next_s = max(self._heard_s + limits.keepalive_s - now_s, limits.keepalive_s / 10)
        self._timer = self._loop.call_in(self._node, next_s, self._keep_alive)


class SendWindow:
    """How much of one stream may be on its way unread. A message goes as a whole once the window is not full."""

    __slots__ = ("_loop", "_unread_bytes", "_waiters")

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._unread_bytes = 0
        self._waiters: list[Any] = []

    @property
    def is_full(self) -> bool:
        """Whether a writer has to wait."""
        return self._unread_bytes >= WINDOW_BYTES

    def take(self, message: bytes) -> None:
        """A message is sent."""
        self._unread_bytes += len(message) + FRAME_OVERHEAD_BYTES

    def give(self, read_bytes: int) -> None:
        """The other end has read."""
        self._unread_bytes -= read_bytes
        if not self.is_full:
            self.wake()

    def wake(self) -> None:
        """Let all waiting writers look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait(self) -> None:
        """Until `wake`."""
        waiter = self._loop.create_future()
        self._waiters.append(waiter)
        await waiter


class ReceiveWindow:
    """What was read and not yet told: told when it is half a window, as HTTP/2 libraries do."""

    __slots__ = ("_read_bytes",)

    def __init__(self) -> None:
        self._read_bytes = 0

    def read(self, message: bytes) -> int:
        """Bytes to tell of now, 0 for none yet."""
        self._read_bytes += len(message) + FRAME_OVERHEAD_BYTES
        if self._read_bytes < WINDOW_BYTES // 2:
            return 0
        told, self._read_bytes = self._read_bytes, 0
        return told
