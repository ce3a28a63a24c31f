"""Brings what keys have used of their budgets into the state store, and what other frontends had into this one.

There it outlives every frontend. It is written at most once a second, behind the answers: a frontend that is killed has
not counted its last second, and frontends together let in what that brings beyond a budget.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from mesh.errors import StoreError
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore
from services.frontend.requests.key_budgets import BUDGETS_PREFIX, MAX_TENANTS, BudgetRecord, KeyBudgets, key_of

log = logging.getLogger(__name__)

WRITE_S: Final = 1.0
MAX_WRITES: Final = 64
"""At a time: tenants beyond are written the next time."""
TRIES: Final = 4
"""Of one write, while other frontends write the same record."""


class StoredBudgets:
    """The budgets of this frontend's keys, with what others have counted."""

    def __init__(self, budgets: KeyBudgets, store: StateStore, unix_s: Callable[[], float]) -> None:
        self.budgets = budgets
        self._store = store
        self._unix_s = unix_s
        self._tenants: dict[str, str] = {}
        """By the keys of their records."""
        self._followed = FollowedPrefix(
            store, BUDGETS_PREFIX, BudgetRecord, self._take, check=BudgetRecord.checked, keeps_former=True
        )
        self._is_away = False
        """Whether the store did not take the last: it is logged once."""

    @property
    def is_heard(self) -> bool:
        """Whether the store has said what was used before; nobody knows what a key has left until then."""
        return self._followed.is_heard

    async def follow(self) -> None:
        """Take in what the store says, for ever; while it is away, what was heard counts on."""
        await self._followed.follow()

    async def write(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        """Go on writing what was taken here: for ever."""
        while True:
            await sleep(WRITE_S)
            await self.flush()

    async def flush(self) -> bool:
        """Write what `MAX_WRITES` allows. False: the store is away, and all is kept for later."""
        past = self.budgets.forget_past(self._unix_s(), MAX_WRITES) if self.is_heard else []
        tenants = self.budgets.take_unwritten(MAX_WRITES)
        try:
            while tenants:
                await self._write(tenants[0])
                del tenants[0]
            for key in past:
                await self._store.delete(key)
        except StoreError as error:
            if not self._is_away:
                log.warning("what keys have used of their budgets is written later", extra={"error": str(error)})
            self._is_away = True
            return False
        finally:
            for tenant in tenants:
                self.budgets.not_written(tenant)
        self._is_away = False
        return True

    async def stop(self) -> None:
        """Write the rest, unless the store is away."""
        for _ in range(MAX_TENANTS // MAX_WRITES + TRIES):
            if not len(self.budgets) or not await self.flush():
                break
        if len(self.budgets):
            log.error("tokens of this frontend are missing in budgets", extra={"keys": len(self.budgets)})

    async def _write(self, tenant: str) -> None:
        """Raises StoreError."""
        key = key_of(tenant)
        for _ in range(TRIES):
            found = await self._store.get(key)
            record = self.budgets.to_write(tenant, None if found is None else _decoded(key, found.value))
            if record is None:
                return
            revision = 0 if found is None else found.mod_revision
            if await self._store.compare_and_swap(key, revision, msgspec.json.encode(record)) is not None:
                return
        self.budgets.not_written(tenant)

    def _take(self, key: str, record: BudgetRecord | None) -> None:
        if record is not None:
            self._tenants[key] = record.tenant
            self.budgets.heard(record.tenant, record)
        elif key in self._tenants:
            self.budgets.heard(self._tenants.pop(key), None)


def _decoded(key: str, value: bytes) -> BudgetRecord | None:
    try:
        return msgspec.json.decode(value, type=BudgetRecord)
    except msgspec.MsgspecError as error:
        log.error("what a key has used cannot be read and is written anew", extra={"key": key, "error": str(error)})
        return None
