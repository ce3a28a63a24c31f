"""A lease held by this process: kept alive until it is revoked, abandoned or lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from mesh.errors import LeaseLost, StoreError
from mesh.runtime import Clock

LeaseLoss = Literal["expired", "unreachable", "revoked", "abandoned"]
Refresh = Callable[[str, float], Awaitable[bool]]
Revoke = Callable[[str, float], Awaitable[None]]

_log = logging.getLogger(__name__)


class Lease:
    """The incarnation id is never granted twice, so it tells a restarted holder from its predecessor.

    Lost for good in two ways: the store says that it is gone ("expired"), or no refresh was answered for `ttl_s`
    ("unreachable"), from when on the holder must assume that its keys are gone. Grant a new one then.
    """

    def __init__(
        self, incarnation_id: str, ttl_s: float, granted_at_s: float, refresh: Refresh, revoke: Revoke, clock: Clock
    ) -> None:
        self.incarnation_id = incarnation_id
        self.ttl_s = ttl_s
        self._held_until_s = granted_at_s + ttl_s
        self._refresh = refresh
        self._revoke = revoke
        self._clock = clock
        self._loss: asyncio.Future[LeaseLoss] = asyncio.get_running_loop().create_future()
        self._keeping_alive = asyncio.create_task(self._keep_alive(granted_at_s), name=f"lease {incarnation_id}")
        # However the loop ends, nobody may go on believing in the lease.
        self._keeping_alive.add_done_callback(lambda _: self._end("unreachable"))

    @property
    def loss(self) -> LeaseLoss | None:
        """Why it no longer holds; None while it does."""
        return self._loss.result() if self._loss.done() else None

    @property
    def held_until_s(self) -> float:
        """Until when it holds for sure, by the clock of this process, if no refresh is answered any more."""
        return self._held_until_s if self.loss is None else -float("inf")

    async def wait_lost(self) -> LeaseLoss:
        """Return, with the reason, once the lease no longer holds."""
        return await asyncio.shield(self._loss)

    def check_held(self) -> None:
        """Raises `LeaseLost` if it no longer holds."""
        if self.loss is not None:
            raise LeaseLost(f"lease {self.incarnation_id} no longer holds ({self.loss}); grant a new one")

    async def revoke(self, *, timeout_s: float = 3.0) -> None:
        """Delete its keys and end it. Raises `StoreUnavailable`; the keys then go when `ttl_s` is over."""
        self._end("revoked")
        await self._revoke(self.incarnation_id, timeout_s)

    def abandon(self) -> None:
        """Stop keeping it alive, as if this process had died: its keys go when `ttl_s` is over."""
        self._end("abandoned")

    def _end(self, reason: LeaseLoss) -> None:
        if not self._loss.done():
            self._loss.set_result(reason)
        self._keeping_alive.cancel()

    async def _keep_alive(self, renewed_at_s: float) -> None:
        self._end(await self._refresh_until_lost(renewed_at_s))

    async def _refresh_until_lost(self, renewed_at_s: float) -> LeaseLoss:
        """Refresh three times per ttl. The time counts from when a refresh was sent: the store started it later."""
        pause_s = self.ttl_s / 3
        while True:
            await self._clock.sleep(pause_s)
            sent_at_s = self._clock.now_s()
            left_s = renewed_at_s + self.ttl_s - sent_at_s
            try:
                alive = await self._refresh(self.incarnation_id, max(min(left_s, self.ttl_s / 6), 0.05))
            except StoreError as error:
                if self._clock.now_s() - renewed_at_s >= self.ttl_s:
                    _log.error("lease %s lost: no answer for %.1f s (%s)", self.incarnation_id, self.ttl_s, error)
                    return "unreachable"
                _log.warning("lease %s was not refreshed: %s", self.incarnation_id, error)
                pause_s = self.ttl_s / 20
                continue
            if not alive:
                _log.error("lease %s lost: the store let it expire", self.incarnation_id)
                return "expired"
            renewed_at_s, pause_s = sent_at_s, self.ttl_s / 3
            self._held_until_s = renewed_at_s + self.ttl_s


class HeldLeases:
    """The leases that one store object keeps alive."""

    def __init__(self, refresh: Refresh, revoke: Revoke, clock: Clock) -> None:
        self._refresh = refresh
        self._revoke = revoke
        self._clock = clock
        self._leases: list[Lease] = []

    def hold(self, incarnation_id: str, ttl_s: float, granted_at_s: float) -> Lease:
        """Start to keep a lease alive that was asked for at `granted_at_s`."""
        lease = Lease(incarnation_id, ttl_s, granted_at_s, self._refresh, self._revoke, self._clock)
        self._leases = [held for held in self._leases if held.loss is None] + [lease]
        return lease

    def abandon_all(self) -> None:
        """Abandon every lease that still holds."""
        for lease in self._leases:
            lease.abandon()
        self._leases.clear()


def incarnation_of(lease: Lease | None) -> str:
    """The incarnation id to write under ("" without a lease). Raises `LeaseLost` if the lease no longer holds."""
    if lease is None:
        return ""
    lease.check_held()
    return lease.incarnation_id
