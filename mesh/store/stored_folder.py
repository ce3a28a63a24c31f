"""Settings that the mesh shares, one key each under a prefix, written by operators, followed by processes."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from mesh.errors import ConfigurationError, StoreCompacted, StoreError
from mesh.store.interface import StateStore, WatchEvent

log = logging.getLogger(__name__)

RETRY_S = 0.5

Record = TypeVar("Record", bound=msgspec.Struct)


class StoredFolder(Generic[Record]):
    """The records under `prefix`, by the rest of their keys, as the store has them. They stand there as JSON."""

    def __init__(
        self,
        store: StateStore,
        prefix: str,
        kind: type[Record],
        check: Callable[[Record], object],
        changed: Callable[[str, Record | None], None] | None = None,
    ) -> None:
        """`check` raises `ConfigurationError` for a record that cannot be used, which is then logged and ignored;
        `changed` is told of each one that is new, other than before, or gone (None)."""
        self._store = store
        self._prefix = prefix
        self._kind = kind
        self._check = check
        self._changed = changed
        self._records: dict[str, Record] = {}

    @property
    def records(self) -> Mapping[str, Record]:
        """By name; a view that changes."""
        return MappingProxyType(self._records)

    async def follow(self) -> None:
        """Take in what the store says, for ever; while it is away the records stay as they are."""
        while True:
            try:
                await self._follow_once()
                return
            except StoreCompacted as error:
                log.info("reading settings again", extra={"prefix": self._prefix, "reason": str(error)})
            except StoreError as error:
                log.warning(
                    "the state store cannot be reached; trying again",
                    extra={"prefix": self._prefix, "error": str(error)},
                )
                await asyncio.sleep(RETRY_S)

    async def _follow_once(self) -> None:
        listing = await self._store.range(self._prefix)
        listed = {entry.key: entry.value for entry in listing.entries}
        for name in [name for name in self._records if self._prefix + name not in listed]:
            self._set(name, None)
        for key, value in listed.items():
            self._take(key, value)
        async with aclosing(self._store.watch(self._prefix, listing.revision + 1)) as events:
            async for event in events:
                self._heard(event)

    def _heard(self, event: WatchEvent) -> None:
        if event.kind == "delete":
            self._set(event.key.removeprefix(self._prefix), None)
        else:
            self._take(event.key, event.value)

    def _take(self, key: str, value: bytes) -> None:
        try:
            record = msgspec.json.decode(value, type=self._kind)
            self._check(record)
        except (msgspec.MsgspecError, ConfigurationError) as error:
            log.error(
                "what the store says of a setting cannot be used and is ignored",
                extra={"key": key, "error": str(error)},
            )
            return
        self._set(key.removeprefix(self._prefix), record)

    def _set(self, name: str, record: Record | None) -> None:
        if self._records.get(name) == record:
            return
        if record is None:
            del self._records[name]
        else:
            self._records[name] = record
        if self._changed is not None:
            self._changed(name, record)
