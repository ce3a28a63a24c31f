"""Keeps up with the objects of one kind: a list, and then a watch from where the list ended."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from mesh.backoff import Backoff
from mesh.errors import ClusterError

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 10.0


class Named(Protocol):
    """An object of the API server."""

    @property
    def name(self) -> str:
        """Within its kind and namespace."""


Followed = TypeVar("Followed", bound=Named)
Shown = TypeVar("Shown", bound=Named, covariant=True)


class Source(Protocol[Shown]):
    """Where objects of one kind come from."""

    async def list(self) -> tuple[tuple[Shown, ...], str]:
        """All of them, and the version of that list. Raises `ClusterError`."""

    def watch(self, version: str) -> AsyncIterator[tuple[bool, Shown]]:
        """Every later change: whether the object is there, and the object. Raises `ClusterError` where it breaks off
        or the version is too old; it may also just end."""


class FollowedObjects(Generic[Followed]):
    """The present objects, by name; while the API server is away they stay as they were."""

    def __init__(self, source: Source[Followed]) -> None:
        self.is_heard = False
        """Whether they have been listed once."""
        self._source = source
        self._objects: dict[str, Followed] = {}
        self._news = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def objects(self) -> Mapping[str, Followed]:
        """A live view, which changes."""
        return MappingProxyType(self._objects)

    async def follow(self) -> None:
        """List and watch, for ever; list again where the watch breaks off."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        while True:
            try:
                objects, version = await self._source.list()
                self._objects.clear()
                self._objects.update({each.name: each for each in objects})
                self.is_heard = True
                self._tell()
                async for is_there, changed in self._source.watch(version):
                    backoff.reset()
                    self._take(is_there, changed)
            except ClusterError as error:
                log.warning("the API server is not heard; listing again", extra={"error": str(error)})
                await asyncio.sleep(backoff.next_s())

    def note(self, created: Followed) -> None:
        """What the API server has just answered: it need not be heard of first."""
        self._objects.setdefault(created.name, created)
        self._tell()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once it holds; it is asked after every change."""
        while not holds():
            await self._news.wait()

    def subscribe(self, heard: Callable[[], None]) -> Callable[[], None]:
        """Have `heard` called after every change, until what is returned is called."""
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def _take(self, is_there: bool, changed: Followed) -> None:
        if is_there:
            self._objects[changed.name] = changed
        else:
            self._objects.pop(changed.name, None)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()
        for heard in tuple(self._listeners):
            heard()
