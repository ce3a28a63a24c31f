"""A setting that the whole mesh shares: one key in the state store, written by operators, followed by processes."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from typing import Generic, TypeVar

import msgspec

from mesh.errors import ConfigurationError, DeadlineExceeded, StoreCompacted, StoreError
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

RETRY_S = 0.5
APPLIED_TIMEOUT_S = 3.0

Record = TypeVar("Record", bound=msgspec.Struct)


class StoredSetting(Generic[Record]):
    """Keeps a process at what the store says. The record stands at the key as JSON."""

    def __init__(
        self,
        store: StateStore,
        key: str,
        kind: type[Record],
        default: Record,
        apply: Callable[[Record, int], None],
        first: Record | None = None,
    ) -> None:
        """`apply` is given every record in turn, with its revision, and `default` while there is none; it may raise
        `ConfigurationError` for one that cannot be used, which is then logged and ignored. `first` is written where
        there is none, for all who follow the setting."""
        self._store = store
        self._key = key
        self._kind = kind
        self._default = default
        self._first = first
        self._apply = apply
        self._revision = 0
        self._applied = asyncio.Condition()

    async def put(self, record: Record) -> None:
        """Write the record; returns when it has come back from the store and been applied here. Raises `StoreError`
        and `DeadlineExceeded`.

        It waits for its own watch instead of applying by itself: with two operators at once, every process must end
        with the record that was written last.
        """
        revision = await self._store.put(self._key, msgspec.json.encode(record))
        try:
            async with asyncio.timeout(APPLIED_TIMEOUT_S), self._applied:
                await self._applied.wait_for(lambda: self._revision >= revision)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{record} is stored at {self._key}, but did not come back within {APPLIED_TIMEOUT_S:g} s"
            ) from None

    async def follow(self) -> None:
        """Apply what the store says, for ever; while it is away the setting stays as it is."""
        while True:
            try:
                listing = await self._store.range(self._key)
                found = [entry.value for entry in listing.entries if entry.key == self._key]
                await self._take(found[0] if found else None, listing.revision)
                async with aclosing(self._store.watch(self._key, listing.revision + 1)) as events:
                    async for event in events:
                        if event.key == self._key:
                            await self._take(event.value if event.kind == "put" else None, event.mod_revision)
                return
            except StoreCompacted as error:
                log.info("reading a setting again", extra={"key": self._key, "reason": str(error)})
            except StoreError as error:
                log.warning(
                    "the state store cannot be reached; trying again", extra={"key": self._key, "error": str(error)}
                )
                await asyncio.sleep(RETRY_S)

    async def _take(self, value: bytes | None, revision: int) -> None:
        try:
            self._apply(self._default if value is None else msgspec.json.decode(value, type=self._kind), revision)
        except (msgspec.MsgspecError, ConfigurationError) as error:
            log.error(
                "what the store says of a setting cannot be used and is ignored",
                extra={"key": self._key, "error": str(error)},
            )
        async with self._applied:
            self._revision = max(self._revision, revision)
            self._applied.notify_all()
        if value is None and self._first is not None:  # the watch brings it, or what another process wrote before
            await self._store.compare_and_swap(self._key, 0, msgspec.json.encode(self._first))
