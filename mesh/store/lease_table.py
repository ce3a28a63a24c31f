"""The leases of a key space: how long each lives and which keys hang on it. Pure; time is an argument."""

from dataclasses import dataclass, field

from mesh.errors import LeaseLost, StoreError

MIN_TTL_S = 0.1
MAX_TTL_S = 24 * 3600.0
MAX_LEASES = 10_000


@dataclass(slots=True)
class _Entry:
    ttl_s: float
    expires_at_s: float
    keys: set[str] = field(default_factory=set)


class LeaseTable:
    """Leases by incarnation id, with the keys that each holds and when it expires. Pure: times are arguments, in
    seconds."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __contains__(self, incarnation_id: str) -> bool:
        return incarnation_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def grant(self, incarnation_id: str, ttl_s: float, now_s: float) -> None:
        """Add a lease. Raises `StoreError` for a bad time to live, too many leases or an id in use."""
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise StoreError(f"a lease lives {MIN_TTL_S} to {MAX_TTL_S:.0f} s, not {ttl_s}")
        if len(self._entries) >= MAX_LEASES:
            raise StoreError(f"the store already holds {MAX_LEASES} leases; revoke some")
        if incarnation_id in self._entries:
            raise StoreError(f"lease {incarnation_id} exists; incarnation ids are granted once")
        self._entries[incarnation_id] = _Entry(ttl_s, now_s + ttl_s)

    def refresh(self, incarnation_id: str, now_s: float) -> bool:
        """Let it live for its ttl from now; False if it is gone."""
        entry = self._entries.get(incarnation_id)
        if entry is None or entry.expires_at_s <= now_s:
            return False
        entry.expires_at_s = now_s + entry.ttl_s
        return True

    def remove(self, incarnation_id: str) -> tuple[str, ...]:
        """End a lease; returns the keys that hung on it. Raises `LeaseLost`."""
        entry = self._entries.pop(incarnation_id, None)
        if entry is None:
            raise LeaseLost(f"there is no lease {incarnation_id}; grant a new one")
        return tuple(sorted(entry.keys))

    def expired(self, now_s: float) -> tuple[str, ...]:
        """Leases whose time is over, the earliest first."""
        due = [(entry.expires_at_s, name) for name, entry in self._entries.items() if entry.expires_at_s <= now_s]
        return tuple(name for _, name in sorted(due))

    def next_expiry_s(self) -> float | None:
        """When the first lease ends unless it is refreshed."""
        return min((entry.expires_at_s for entry in self._entries.values()), default=None)

    def check(self, incarnation_id: str) -> None:
        """Raises `LeaseLost` unless a key may hang on it; "" is no lease."""
        if incarnation_id and incarnation_id not in self._entries:
            raise LeaseLost(f"there is no lease {incarnation_id}; grant a new one")

    def move_key(self, key: str, before: str, after: str) -> None:
        """A key hung on lease `before` ("" for none) and hangs on `after` now."""
        if before in self._entries:
            self._entries[before].keys.discard(key)
        if after:
            self._entries[after].keys.add(key)
