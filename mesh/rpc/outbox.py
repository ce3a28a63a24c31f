"""What waits to be written to a stream: bounded, in order, and itself the iterator that gRPC reads it from."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Final, Generic, TypeVar

from mesh.errors import PeerUnavailable

log = logging.getLogger(__name__)

MAX_OUTBOX_MESSAGES: Final = 8192

Out = TypeVar("Out")


class Outbox(Generic[Out]):
    """Messages to one peer. A peer that does not read them is told of to whoever sends the next one.

    No generator: gRPC iterates in a task of its own, which it cancels and does not wait for. A generator that is
    suspended there when the loop ends is closed by the loop while that task still holds it ("generator is already
    running"), and the task is told of as destroyed. An iterator needs no closing, and this one ends when it is told to.
    """

    def __init__(self, peer: str, max_messages: int = MAX_OUTBOX_MESSAGES) -> None:
        """`peer` names the other side in logs and errors."""
        self._peer = peer
        self._max_messages = max_messages
        self._messages: deque[Out] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_closed = False

    def put(self, message: Out) -> None:
        """Raises PeerUnavailable if the peer has long stopped reading."""
        if self._is_full:
            raise PeerUnavailable(f"{self._peer} does not read: {self._max_messages} messages wait for it")
        self._messages.append(message)
        self._wake()

    def close(self) -> None:
        """End the iteration; what still waits is dropped."""
        self._is_closed = True
        self._wake()

    @property
    def _is_full(self) -> bool:
        return len(self._messages) >= self._max_messages

    def __aiter__(self) -> AsyncIterator[Out]:
        return self

    async def __anext__(self) -> Out:
        while not self._is_closed:
            if self._messages:
                return self._messages.popleft()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        raise StopAsyncIteration

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class LossyOutbox(Outbox[Out]):
    """For protocols that send again what was lost: what does not fit is dropped."""

    def put(self, message: Out) -> None:
        """Queue the message, or drop it loudly if the peer has long stopped reading."""
        if self._is_full:
            log.warning("a message was dropped: the peer does not read", extra={"peer": self._peer})
            return
        super().put(message)
