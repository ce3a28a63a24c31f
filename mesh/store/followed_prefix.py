"""Records under a prefix of the state store, written by some processes and followed by others."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec

from mesh.errors import ConfigurationError, StoreCompacted, StoreError
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

RETRY_S = 0.5

Record = TypeVar("Record", bound=msgspec.Struct)


class FollowedPrefix(Generic[Record]):
    """Keeps a process at what the store says. Each record stands at its key as JSON."""

    def __init__(
        self,
        store: StateStore,
        prefix: str,
        kind: type[Record],
        on_change: Callable[[str, Record | None], None],
        *,
        check: Callable[[Record], object] | None = None,
        keeps_former: bool = False,
    ) -> None:
        """`on_change` is called with the key and the new record, None for one that is gone. A record that cannot be
        read, or for which `check` raises `ConfigurationError`, is logged and taken as gone or, with `keeps_former`,
        ignored."""
        self.records: dict[str, Record] = {}
        """The records by key, as last heard."""
        self.is_heard = False
        """Whether the store has listed them once."""
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._on_change = on_change
        self._check = check
        self._keeps_former = keeps_former

    async def follow(self) -> None:
        """For ever; while the store is away the records stay as they are."""
        while True:
            try:
                listing = await self._store.range(self._prefix)
                for key in sorted(self.records.keys() - {entry.key for entry in listing.entries}):
                    self._take(key, None)
                for entry in listing.entries:
                    self._take(entry.key, entry.value)
                self.is_heard = True
                async with aclosing(self._store.watch(self._prefix, listing.revision + 1)) as events:
                    async for event in events:
                        self._take(event.key, event.value if event.kind == "put" else None)
                return
            except StoreCompacted as error:
                log.info("reading records again", extra={"prefix": self._prefix, "reason": str(error)})
            except StoreError as error:
                log.warning(
                    "the state store cannot be reached; trying again",
                    extra={"prefix": self._prefix, "error": str(error)},
                )
                await asyncio.sleep(RETRY_S)

    def _take(self, key: str, value: bytes | None) -> None:
        record: Record | None = None
        if value is not None:
            try:
                record = msgspec.json.decode(value, type=self._kind)
                if self._check is not None:
                    self._check(record)
            except (msgspec.MsgspecError, ConfigurationError) as error:
                log.error("a record of the store cannot be used", extra={"key": key, "error": str(error)})
                record = None
                if self._keeps_former:
                    return
        if self.records.get(key) == record:
            return
        if record is None:
            del self.records[key]
        else:
            self.records[key] = record
        self._on_change(key, record)
