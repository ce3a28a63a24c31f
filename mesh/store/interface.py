"""The state store: a small, ordered, watchable key space for durable intent and membership.

It means the same in every implementation (etcd's data model): each write gets the next revision of the whole store, a
key remembers the revision of its last write, a lease takes its keys with it when it ends.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from mesh.store.lease import Lease

DEFAULT_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key as of its last write. `incarnation_id` names the lease it hangs on ("" without one)."""

    key: str
    value: bytes
    mod_revision: int
    incarnation_id: str = ""


class Listing(NamedTuple):
    """Keys in ascending order, and the revision of the store at which they stood like this."""

    revision: int
    entries: tuple[KeyValue, ...]


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key; `value` and `incarnation_id` are empty for a delete."""

    kind: Literal["put", "delete"]
    key: str
    value: bytes
    mod_revision: int
    incarnation_id: str = ""
    is_inferred: bool = False
    """Of a delete that was not heard: the key is missing since the watch was interrupted. It may have been deleted, or
    the store has lost its data."""


class StateStore(Protocol):
    """Every call ends within `timeout_s`, with `StoreUnavailable` if the store did not answer.

    A write that ended so may or may not have happened: read before writing again. Bad keys and values and a full store
    raise `StoreError`, a lease that is gone `LeaseLost`.
    """

    async def get(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> KeyValue | None:
        """The newest value of a key; None if there is none. Sees every write that was answered before."""

    async def range(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Listing:
        """All keys that begin with `prefix` ("" for all) at one revision."""

    async def put(
        self, key: str, value: bytes, *, lease: Lease | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> int:
        """Write and return the revision. The key hangs on `lease` from now on, or on none."""

    async def compare_and_swap(
        self,
        key: str,
        expected_mod_revision: int,
        value: bytes,
        *,
        lease: Lease | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> int | None:
        """Write only if the key still has `expected_mod_revision` (0: is absent). None: someone else was first."""

    async def delete(self, key: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
        """Delete a key; False if there was none."""

    async def delete_prefix(self, prefix: str, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> int:
        """Delete all keys that begin with `prefix` at one revision; returns how many there were."""

    async def grant_lease(self, ttl_s: float, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> Lease:
        """A lease under a fresh incarnation id, kept alive by this process until revoked, abandoned or lost.

        The store may round `ttl_s` up (etcd: whole seconds); `Lease.ttl_s` is what was granted.
        """

    def watch(
        self, prefix: str, from_revision: int | None = None, *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> AsyncGenerator[WatchEvent]:
        """Every change under `prefix`, each once and in order, across restarts of the store and lost connections.

        `from_revision` is the first revision to report: `Listing.revision + 1` after a `range`. None begins when the
        first event is asked for; 0 first reports what is there as puts. Close the generator when done with it
        (`contextlib.aclosing`); it ends by itself when the store is closed.

        Where the store has compacted what happened during a disconnection, the difference is reported instead: a put
        for each key that changed, then a delete for each that is gone, at the revision of the listing. Revisions never
        go down unless the store itself lost its data.

        Raises `StoreUnavailable` if the watch cannot be started within `timeout_s` (once started it waits for the store
        as long as it takes), and `StoreCompacted` if `from_revision` is not there any more: list again.
        """

    async def close(self) -> None:
        """Let go of everything. Leases are abandoned, not revoked."""
