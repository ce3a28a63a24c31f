"""Bounded queues of messages that wait to be sent to a frontend."""

import asyncio
from collections import deque

from penstock.v1 import worker_pb2


class OutputStream:
    """A bounded queue from the engine's steps to one frontend's stream.

    The engine never waits for a frontend: one that lags behind by more than the bounds is cut off. Dropping or
    merging its messages instead would either lose tokens or hide that it cannot keep up.
    """

    def __init__(
        self,
        stream_id: int,
        frontend_id: str,
        *,
        max_messages: int,
        max_bytes: int,
        wants_heartbeats: bool = False,
    ) -> None:
        self.stream_id = stream_id
        self.frontend_id = frontend_id
        self.wants_heartbeats = wants_heartbeats
        self.messages = 0
        """Put so far."""
        self.heard_messages = 1
        """Come from the frontend so far; the hello was the first."""
        self.input_ended = False
        """The frontend will send nothing more, but still reads."""
        self.cut_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Set when the stream has to be broken."""
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._waiting: deque[tuple[int, worker_pb2.WorkerMessage]] = deque()
        self._waiting_bytes = 0
        self._closed = False
        self._ready = asyncio.Event()

    def put(self, message: worker_pb2.WorkerMessage) -> int:
        """Queue a message and return its size in bytes. What does not fit cuts the stream."""
        message.heard_messages = self.heard_messages
        size_bytes = message.ByteSize()
        self.messages += 1
        self._waiting.append((size_bytes, message))
        self._waiting_bytes += size_bytes
        self._ready.set()
        if len(self._waiting) > self._max_messages or self._waiting_bytes > self._max_bytes:
            self.cut(
                f"frontend {self.frontend_id} does not read: {len(self._waiting)} steps, {self._waiting_bytes} bytes "
                "wait for it; its requests are aborted"
            )
        return size_bytes

    def cut(self, reason: str) -> None:
        """Break the stream; what waits is dropped."""
        self._waiting.clear()
        self._waiting_bytes = 0
        if not self.cut_reason.done():
            self.cut_reason.set_result(reason)

    @property
    def is_cut(self) -> bool:
        """Whether the stream must be broken off, because its reader is too slow."""
        return self.cut_reason.done()

    def close(self) -> None:
        """Nothing more will be put; what waits is still sent."""
        self._closed = True
        self._ready.set()

    async def take(self) -> worker_pb2.WorkerMessage | None:
        """The next message, waiting for one; None once the stream is closed and empty."""
        while not self._waiting:
            if self._closed:
                return None
            self._ready.clear()
            await self._ready.wait()
        size_bytes, message = self._waiting.popleft()
        self._waiting_bytes -= size_bytes
        return message
