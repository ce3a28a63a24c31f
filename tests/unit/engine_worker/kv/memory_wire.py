"""Two ends of a connection in one process: what UCX does for a transfer, without UCX.

Tag semantics as UCX has them: messages of a tag match receives of it in order, a receive may get a shorter message,
and after a cut every operation completes with an error.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np

from engine_worker.kv.messages import Control, decode, encode
from mesh.errors import PeerUnavailable, RpcError

Operation = tuple[np.ndarray, "asyncio.Future[None]"]


class MemoryConnection:
    """Stands for a `Connection`."""

    def __init__(self, name: str) -> None:
        self.peer_name = name
        self.is_cut = False
        self.reason = ""
        self.other: MemoryConnection
        self.handle: Callable[[Control], None] = lambda message: None
        self.lose_control = False
        """From now on the other side hears nothing, as if this one hung."""
        self.on_cut: list[Callable[[MemoryConnection], None]] = []
        self.receives: dict[int, deque[Operation]] = {}
        self.unexpected: dict[int, deque[Operation]] = {}

    def send(self, message: Control) -> None:
        frame = bytes(encode(message))
        if not self.is_cut and not self.lose_control:
            asyncio.get_running_loop().call_soon(self._deliver, frame)

    def send_data(self, transfer: int, buffer: np.ndarray) -> "asyncio.Future[None]":
        return self._begin(self.other.unexpected, transfer, buffer, self.other)

    def receive_data(self, transfer: int, buffer: np.ndarray) -> "asyncio.Future[None]":
        return self._begin(self.receives, transfer, buffer, self)

    def cut(self, reason: str) -> None:
        for end in (self, self.other):
            if end.is_cut:
                continue
            end.is_cut, end.reason = True, reason
            for queues in (end.receives, end.unexpected):
                for queue in queues.values():
                    for _, future in queue:
                        fail(future, reason)
                queues.clear()
            for callback in end.on_cut:
                callback(end)

    def lost(self) -> RpcError:
        return PeerUnavailable(self.reason)

    @property
    def left_over(self) -> int:
        """Receives and messages that have found no partner."""
        return sum(len(queue) for queues in (self.receives, self.unexpected) for queue in queues.values())

    def _begin(
        self, queues: dict[int, deque[Operation]], transfer: int, buffer: np.ndarray, receiver: "MemoryConnection"
    ) -> "asyncio.Future[None]":
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_cut:
            fail(future, self.reason)
        else:
            queues.setdefault(transfer, deque()).append((buffer, future))
            asyncio.get_running_loop().call_soon(receiver._match, transfer)
        return future

    def _match(self, transfer: int) -> None:
        receives, messages = self.receives.get(transfer), self.unexpected.get(transfer)
        while receives and messages:
            (into, received), (content, sent) = receives.popleft(), messages.popleft()
            assert content.size <= into.size, "a message is longer than its receive"
            into[: content.size] = content
            received.set_result(None)
            sent.set_result(None)

    def _deliver(self, frame: bytes) -> None:
        if not self.other.is_cut:
            self.other.handle(decode(frame))


def fail(future: "asyncio.Future[None]", reason: str) -> None:
    if not future.done():
        future.set_exception(ConnectionError(reason))
        future.exception()


def connected() -> tuple[MemoryConnection, MemoryConnection]:
    puller, source = MemoryConnection("source"), MemoryConnection("puller")
    puller.other, source.other = source, puller
    return puller, source
