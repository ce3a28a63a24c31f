"""Tells every monitor of the mesh what this instance is, how loaded it is and what its prefix cache holds."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from controlplane.model.instance import KvBlocks, KvTier
from engine_worker.cache_ledger import CacheLedger
from engine_worker.decode_reporting import DecodeReporting
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.store import HostStore
from engine_worker.instance import Instance
from engine_worker.metrics import WorkerMetrics
from engine_worker.monitor_link import MonitorLink
from engine_worker.settings import WorkerSettings
from mesh.backoff import Backoff
from mesh.errors import HostTierUnavailable
from mesh.membership import ChangeKind, Directory, Member, MemberChange
from mesh.runtime import Runtime
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

HOST_LOOK_S = 0.1
"""Between two looks at what other instances have stored in the host's memory, or evicted there."""
HOST_MISSED = 10
"""Looks in a row at which somebody else had the store locked, before that is news: they do not wait for it."""
HOST_KEEP_S = 60.0


class Reporter:
    """One link for each monitor in the directory, fed from one ledger of cached blocks, and one each of those that the
    host's memory and its disk hold."""

    def __init__(
        self,
        instance: Instance,
        settings: WorkerSettings,
        metrics: WorkerMetrics,
        runtime: Runtime,
        host_store: HostStore | None = None,
        disk_store: DiskStore | None = None,
    ) -> None:
        self.ledger = CacheLedger(instance.description.kv_blocks)
        self.host_store, self.disk_store = host_store, disk_store
        stores: list[tuple[KvTier, HostStore | DiskStore | None]] = [
            (KvTier.HOST, host_store),
            (KvTier.DISK, disk_store),
        ]
        self._stores = [(store, CacheLedger(store.slots, tier)) for tier, store in stores if store is not None]
        """What this host keeps besides, and what was told of it."""
        self.decoding = DecodeReporting(instance.table)
        self._instance = instance
        self._settings = settings
        self._metrics = metrics
        self._runtime = runtime
        self._links: dict[str, tuple[MonitorLink, asyncio.Task[None]]] = {}
        self._tasks = TaskSet("reporter")
        self._unsubscribe: Callable[[], None] | None = None

    def start(self, directory: Directory, kv_blocks: AsyncIterator[KvBlocks]) -> None:
        """Report to the monitors of `directory`, present and future, until `stop`."""
        self._instance.on_change.append(self._on_instance_change)
        self._tasks.spawn(self._follow_cache(kv_blocks), name="cache", on_error=lambda _: self._lose_cache())
        for store, ledger in self._stores:
            self._tasks.spawn(self._follow_store(store, ledger), name=f"{ledger.tier} tier")
        self._unsubscribe = directory.subscribe(self._on_member_change)

    async def stop(self) -> None:
        """End all report streams, which takes the instance out of the mesh."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        await self._tasks.cancel()

    def _on_instance_change(self) -> None:
        for link, _ in self._links.values():
            link.note_step()

    def _on_member_change(self, change: MemberChange) -> None:
        if change.member.role != "monitor":
            return
        if change.kind is ChangeKind.JOINED:
            self._join(change.member)
        elif change.kind is ChangeKind.CHANGED:
            link, _ = self._links[change.member.member_id]
            link.readdress(change.member.address)
        else:
            left = self._links.pop(change.member.member_id, None)
            if left is not None:
                left[1].cancel()

    def _join(self, monitor: Member) -> None:
        link = MonitorLink(
            monitor.address,
            self._instance,
            (self.ledger, *(ledger for _, ledger in self._stores)),
            self._settings,
            self._metrics,
            Backoff(draw=self._runtime.entropy.generator().random),
            self._runtime.clock.now_s,
            self._runtime.transport,
            self.decoding,
        )
        task = self._tasks.spawn(link.run(), name=f"report to {monitor.member_id}")
        self._links[monitor.member_id] = (link, task)

    async def _follow_cache(self, kv_blocks: AsyncIterator[KvBlocks]) -> None:
        async for change in kv_blocks:
            overflows = self.ledger.overflows_total
            self._pass_on(self.ledger.apply(change))
            if self.ledger.overflows_total != overflows:
                log.error("the engine named more cached blocks than it has; its events are incomplete")

    async def _follow_store(self, store: HostStore | DiskStore, ledger: CacheLedger) -> None:
        """Any instance of the host may have changed what its store holds."""
        looks, missed = 0, 0
        while True:
            try:
                if (change := store.changes()) is not None:
                    self._pass_on(ledger.apply(change))
                missed = 0
            except HostTierUnavailable as error:
                missed += 1
                if missed == HOST_MISSED:
                    log.warning(
                        "the host's store of KV blocks cannot be looked at",
                        extra={"tier": ledger.tier, "error": str(error)},
                    )
            if looks % (HOST_KEEP_S // HOST_LOOK_S) == 0:
                store.keep()
            looks += 1
            await self._runtime.clock.sleep(HOST_LOOK_S)

    def _lose_cache(self) -> None:
        """The engine's cache events have ended with an error (logged): an empty index beats a stale one."""
        self._pass_on(self.ledger.apply(KvBlocks(cleared=True)))

    def _pass_on(self, change: KvBlocks) -> None:
        for link, _ in self._links.values():
            link.note_cache(change)
