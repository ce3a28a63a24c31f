"""How a watch survives disconnection: a pure cursor over what was reported, and the loop that follows it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from mesh.backoff import Backoff
from mesh.errors import StoreCompacted, StoreUnavailable
from mesh.store.interface import Listing, WatchEvent

_log = logging.getLogger(__name__)


class WatchCursor:
    """What a watch has reported so far.

    `revision` is where to go on, inclusive: the events of one revision (a prefix deleted at once) may arrive in several
    messages, so the last revision is asked for again and what was reported of it is dropped.
    """

    def __init__(self, revision: int, present: Mapping[str, int]) -> None:
        """`present`: the keys under the prefix just before `revision`, with their mod revisions."""
        self.revision = revision
        self._present = dict(present)
        self._reported: set[str] = set()

    def accept(self, event: WatchEvent) -> bool:
        """Take in an event of the store; False if it was reported before."""
        if event.mod_revision < self.revision:
            return False
        if event.mod_revision == self.revision and event.key in self._reported:
            return False
        if event.mod_revision > self.revision:
            self.revision = event.mod_revision
            self._reported.clear()
        self._reported.add(event.key)
        if event.kind == "put":
            self._present[event.key] = event.mod_revision
        else:
            self._present.pop(event.key, None)
        return True

    def is_ahead_of(self, revision: int) -> bool:
        """A store at this revision has lost what was reported."""
        return revision < (self.revision if self._reported else self.revision - 1)

    def difference(self, listing: Listing) -> list[WatchEvent]:
        """The events that lead from what was reported to `listing`; goes on after it."""
        # The revisions of a store that lost its data say nothing about what was reported of the old one.
        known = {} if self.is_ahead_of(listing.revision) else self._present
        changed = [entry for entry in listing.entries if known.get(entry.key) != entry.mod_revision]
        there = {entry.key: entry.mod_revision for entry in listing.entries}
        events = [
            WatchEvent("put", entry.key, entry.value, entry.mod_revision, entry.incarnation_id)
            for entry in sorted(changed, key=lambda entry: entry.mod_revision)
        ]
        events += [
            WatchEvent("delete", key, b"", listing.revision, is_inferred=True)
            for key in sorted(self._present.keys() - there.keys())
        ]
        self.revision, self._present, self._reported = listing.revision + 1, there, set()
        return events


class WatchSource(Protocol):
    """What a store offers to the loop below. `StoreUnavailable` means: try again later."""

    async def head(self, timeout_s: float) -> int:
        """The store's newest revision. Raises `StoreError`."""

    async def list(self, prefix: str, at_revision: int, keys_only: bool, timeout_s: float) -> Listing:
        """The keys as they stood at a revision (0: now). Raises `StoreCompacted`."""

    def stream(self, prefix: str, from_revision: int) -> AsyncGenerator[Sequence[WatchEvent]]:
        """Events in order, until the connection is lost (`StoreUnavailable`) or history is gone (`StoreCompacted`).

        The first item, perhaps empty, says that the stream stands.
        """

    @property
    def closed(self) -> bool:
        """The store was closed by its owner."""


async def watch_resuming(
    source: WatchSource, prefix: str, from_revision: int | None, backoff: Backoff, timeout_s: float
) -> AsyncGenerator[WatchEvent]:
    """`StateStore.watch` on top of a source that loses its connection."""
    cursor = await _start(source, prefix, from_revision, timeout_s)
    must_list = from_revision == 0
    interrupted = False
    while not source.closed:
        try:
            if interrupted and cursor.is_ahead_of(await source.head(timeout_s)):
                _log.error("the store came back older than revision %d: it lost data", cursor.revision)
                must_list = True
            if must_list:
                events = cursor.difference(await source.list(prefix, 0, False, timeout_s))
                must_list = False
                for event in events:
                    yield event
            async with aclosing(source.stream(prefix, cursor.revision)) as stream:
                async for batch in stream:
                    backoff.reset()
                    for event in filter(cursor.accept, batch):
                        yield event
        except StoreCompacted:
            _log.warning("watch %r: history before revision %d is gone, listing again", prefix, cursor.revision)
            must_list = True
        except StoreUnavailable as error:
            if not source.closed:
                _log.warning("watch %r interrupted, resuming from revision %d: %s", prefix, cursor.revision, error)
                await asyncio.sleep(backoff.next_s())
        interrupted = True


async def _start(source: WatchSource, prefix: str, from_revision: int | None, timeout_s: float) -> WatchCursor:
    if from_revision is not None and from_revision <= 1:
        return WatchCursor(from_revision, {})
    # The keys there at the start are needed to notice later what was deleted during a gap.
    listing = await source.list(prefix, 0 if from_revision is None else from_revision - 1, True, timeout_s)
    revision = listing.revision + 1 if from_revision is None else from_revision
    return WatchCursor(revision, _revisions(listing))


def _revisions(listing: Listing) -> dict[str, int]:
    return {entry.key: entry.mod_revision for entry in listing.entries}
