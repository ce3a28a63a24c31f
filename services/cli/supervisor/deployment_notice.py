"""Keeps what a supervisor says of its instances in the state store, for as long as it lives."""

import asyncio
import logging
from contextlib import suppress

import msgspec

from controlplane.deployment.deployment_status import DeploymentStatus
from mesh.announcement import CHECK_S
from mesh.errors import StoreError
from mesh.membership import LEASE_TTL_S, RETRY_S
from mesh.store.interface import StateStore
from mesh.store.lease import Lease

log = logging.getLogger(__name__)


class DeploymentNotice:
    """One record under a lease of its own."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._record: DeploymentStatus | None = None
        self._news = asyncio.Event()

    def say(self, record: DeploymentStatus) -> bool:
        """Have it written soon; True where it differs from the last."""
        if record == self._record:
            return False
        self._record = record
        self._news.set()
        return True

    async def keep(self) -> None:
        """For ever; when cancelled the record is taken back."""
        while True:
            await self._news.wait()
            lease: Lease | None = None
            try:
                lease = await self._store.grant_lease(LEASE_TTL_S)
                await self._write_until_lost(lease)
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
            finally:
                if lease is not None and lease.loss is None:
                    with suppress(StoreError):
                        await lease.revoke()
            self._news.set()

    async def _write_until_lost(self, lease: Lease) -> None:
        lost = asyncio.create_task(lease.wait_lost())
        try:
            while not lost.done():
                self._news.clear()
                if self._record is not None:
                    await self._write(self._record, lease)
                news = asyncio.create_task(self._news.wait())
                try:
                    await asyncio.wait((lost, news), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    news.cancel()
        finally:
            lost.cancel()

    async def _write(self, record: DeploymentStatus, lease: Lease) -> None:
        """Unless it stands there already: somebody may have deleted it, or the store may have lost its data."""
        value = msgspec.json.encode(record)
        there = await self._store.get(record.key)
        if there is None or there.value != value or there.incarnation_id != lease.incarnation_id:
            await self._store.put(record.key, value, lease=lease)
