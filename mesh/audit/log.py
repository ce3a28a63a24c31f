"""The audit log: a line in the log of the process that took an order, and a bounded record in the state store.

The store's records outlive the process, which a drain or a restart ends. Each role has a ring of its own there, so that
a member can overwrite what its own role was ordered and nothing else (`mesh.identity.doors.may_write`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from mesh.audit.orders import Order
from mesh.backoff import Backoff
from mesh.errors import PenstockError
from mesh.identity.doors import AUDIT
from mesh.store.interface import StateStore

log = logging.getLogger(__name__)

KEPT: Final = 512
"""Orders of each role that the store remembers; some 200 bytes each."""
MAX_UNWRITTEN: Final = 256
"""Orders that wait for a store that is away; the oldest beyond are in the process's log only."""
FLUSH_S: Final = 1.0
"""How long the end of a process waits for what is not written yet."""
_ATTEMPTS: Final = 8
"""At the next number, which another process of the role may take first."""


@dataclass(slots=True)
class Unwritten:
    """An order that is not known to be in the store yet.

    It keeps the number that it has taken: a write that is cancelled or not answered in time may have happened, and the
    next one goes to the same place, so that no order is there twice.
    """

    order: Order
    number: int | None = None


class AuditLog:
    """The orders that one process was given."""

    def __init__(self, role: str = "none", member_id: str = "none") -> None:
        self.to = f"{role}/{member_id}"
        """How this process is named in its orders."""
        self._ring = f"{AUDIT}{role}/"
        self._unwritten: deque[Unwritten] = deque()
        self._news = asyncio.Event()

    def add(self, order: Order) -> None:
        """Remember an order that has its outcome. Never waits."""
        log.warning("an order", extra=msgspec.to_builtins(order))
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._unwritten.popleft()
            log.error("the state store is away for long: an order is in this log only")
        self._unwritten.append(Unwritten(order))
        self._news.set()

    async def write(self, store: StateStore, backoff: Backoff) -> None:
        """Bring orders into the store: for ever, also after it was away."""
        while True:
            await self._news.wait()
            try:
                await self._write_all(store)
                self._news.clear()
                backoff.reset()
            except PenstockError as error:
                log.error("an order could not be written to the state store", extra={"error": str(error)})
                await asyncio.sleep(backoff.next_s())

    async def flush(self, store: StateStore) -> None:
        """Write what is left, as the process ends; what cannot be written in time is in its log only."""
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._write_all(store)
        except (PenstockError, TimeoutError):
            log.error("orders could not be written to the state store", extra={"orders": len(self._unwritten)})

    async def _write_all(self, store: StateStore) -> None:
        while self._unwritten:
            oldest = self._unwritten[0]
            await put_order(store, self._ring, oldest)
            if self._unwritten and self._unwritten[0] is oldest:  # and was not dropped meanwhile
                self._unwritten.popleft()


async def put_order(store: StateStore, ring: str, unwritten: Unwritten) -> None:
    """Write an order in the place of its number, which is that of the oldest one where the ring is full. Raises
    PenstockError."""
    if unwritten.number is None:
        unwritten.number = await _next_number(store, f"{ring}next")
    await store.put(f"{ring}{unwritten.number % KEPT:04}", msgspec.json.encode(unwritten.order))


async def _next_number(store: StateStore, counter: str) -> int:
    for _ in range(_ATTEMPTS):
        found = await store.get(counter)
        number = int(found.value) if found is not None and found.value.isdigit() else 0
        revision = 0 if found is None else found.mod_revision
        if await store.compare_and_swap(counter, revision, str(number + 1).encode()) is not None:
            return number
    raise PenstockError(f"{_ATTEMPTS} other orders came first each time; the order is written again soon")


async def read_orders(store: StateStore, since_unix_ms: int = 0) -> Sequence[Order]:
    """Those that the store remembers, of all processes, oldest first. Raises PenstockError."""
    listing = await store.range(AUDIT)
    orders = [_decoded(entry.value) for entry in listing.entries if not entry.key.endswith("/next")]
    kept = (order for order in orders if order is not None and order.unix_ms >= since_unix_ms)
    return sorted(kept, key=lambda order: order.unix_ms)


def _decoded(value: bytes) -> Order | None:
    """None for what a newer version has written otherwise, or nobody of a mesh."""
    try:
        return msgspec.json.decode(value, type=Order)
    except msgspec.MsgspecError:
        return None
