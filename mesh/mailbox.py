"""A queue with one reader that can be closed, with an error or without."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An unbounded queue with one reader, which sees the items in order and then the end, or the error with which it
    was closed.

    Putting never blocks. Whoever puts keeps it bounded: it looks at `len`, or replaces what waits.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Append an item. Items put after `close` are dropped: nobody waits for them."""
        if not self._closed:
            self._items.append(item)
            self._changed.set()

    def replace_all(self, item: T) -> None:
        """Drop what is unread in favour of one item that stands for it."""
        self._items.clear()
        self.put(item)

    def close(self, error: Exception | None = None) -> None:
        """No more items; the reader gets those left, then the end or `error`. The first close counts."""
        if not self._closed:
            self._closed = True
            self._error = error
            self._changed.set()

    async def below(self, items: int) -> None:
        """Wait until fewer than `items` are unread."""
        while len(self._items) >= items:
            self._taken.clear()
            await self._taken.wait()

    async def read(self) -> AsyncIterator[T]:
        """Every item; raises the error with which the box was closed."""
        while True:
            while self._items:
                item = self._items.popleft()
                self._taken.set()
                yield item
            if self._closed:
                break
            self._changed.clear()
            await self._changed.wait()
        if self._error is not None:
            raise self._error
