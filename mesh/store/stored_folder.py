"""Settings that operators write, one key each under a prefix: a broken one never takes the place of a good one."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore

Record = TypeVar("Record", bound=msgspec.Struct)


class StoredFolder(Generic[Record]):
    """The records under `prefix`, by the rest of their keys, as the store has them."""

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
        self._prefix = prefix
        self._changed = changed
        self._records: dict[str, Record] = {}
        self._followed = FollowedPrefix(store, prefix, kind, self._take, check=check, keeps_former=True)

    @property
    def records(self) -> Mapping[str, Record]:
        """The present records by name: a live view, which changes."""
        return MappingProxyType(self._records)

    @property
    def is_heard(self) -> bool:
        """Whether the store has listed the records once."""
        return self._followed.is_heard

    async def follow(self) -> None:
        """Take in what the store says, for ever; while it is away the records stay as they are."""
        await self._followed.follow()

    def _take(self, key: str, record: Record | None) -> None:
        name = key.removeprefix(self._prefix)
        if record is None:
            del self._records[name]
        else:
            self._records[name] = record
        if self._changed is not None:
            self._changed(name, record)
