"""Leads a duty while it can: carries out what the candidate of `leadership_state` decides, against the state store."""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from mesh.errors import StoreError
from mesh.leadership_state import (
    Announce,
    Candidate,
    Instruction,
    LeaderRecord,
    Lock,
    ReadEpoch,
    TryLater,
    Unlock,
    Verify,
    WriteEpoch,
)
from mesh.role import RoleContext
from mesh.runtime import Clock
from mesh.store.followed_prefix import FollowedPrefix
from mesh.store.interface import StateStore
from mesh.store.lease import Lease
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

LEADERS_PREFIX: Final = "/penstock/leaders/"
EPOCHS_PREFIX: Final = "/penstock/epochs/"
LEADER_TTL_S: Final = 3.0
"""Seconds without a leader, at most, after one was killed."""
RETRY_S: Final = 0.5


class EpochRecord(msgspec.Struct, frozen=True):
    """The last epoch of a duty; it outlives its holder's lease."""

    epoch: int


class LeadershipMetrics:
    """`penstock_leadership_...` of all duties of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.leading = Gauge("penstock_leadership_leading", "1 while this process leads", ["duty"], registry=registry)
        self.epoch = Gauge(
            "penstock_leadership_epoch", "Its fencing epoch when it last led", ["duty"], registry=registry
        )
        self.changes = Counter(
            "penstock_leadership_changes", "Times that this process began or ceased to lead", ["duty", "change"],
            registry=registry,
        )  # fmt: skip


class Leadership:
    """One process's part in one duty. `run` it; act only while `is_leading`, and put `epoch` into every order."""

    def __init__(
        self,
        store: StateStore,
        me: LeaderRecord,
        clock: Clock,
        metrics: LeadershipMetrics,
        on_change: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`me` names the duty and this process. `on_change` is called with whether it leads now, and must not block."""
        self._store = store
        self._me = me
        self._clock = clock
        self._metrics = metrics
        self._on_change = on_change
        self.candidate = Candidate(me.duty, me.incarnation_id, me.member_id)
        self._lease: Lease | None = None
        self._lock_revision = 0
        self._led = False
        self._tasks = TaskSet(f"leader of {me.duty}")
        key = LEADERS_PREFIX + me.duty
        self._key = key
        self._records = FollowedPrefix(store, key, LeaderRecord, self._changed)
        metrics.leading.labels(me.duty).set(0)

    @property
    def duty(self) -> str:
        """Name of the duty that this candidate wants to lead (`controlplane.model.duties`)."""
        return self._me.duty

    @property
    def is_leading(self) -> bool:
        """Whether this process may give orders now."""
        if self._lease is not None:
            self.candidate.renewed(self._lease.held_until_s)
        return self.candidate.leads(self._clock.now_s())

    @property
    def epoch(self) -> int:
        """Epoch of this process's latest leadership; 0 before it ever led."""
        return self.candidate.epoch

    @property
    def leader(self) -> LeaderRecord | None:
        """The present leader's record, as last heard; None while nobody leads."""
        if self.is_leading:
            return msgspec.structs.replace(self._me, epoch=self.epoch)
        holder = self.candidate.holder
        return holder if holder is not None and holder.epoch else None

    def refused(self, epoch: int) -> None:
        """An order was refused by somebody who has seen this epoch."""
        log.error("an order was refused: somebody has seen a higher epoch", extra={"duty": self.duty, "epoch": epoch})
        self._carry_out(self.candidate.refused(epoch))

    async def run(self) -> None:
        """Be a candidate, and lead when there is no other leader, until cancelled."""
        self._tasks.spawn(self._records.follow(), name="watch")
        while True:
            self._carry_out(self.candidate.retry())
            await self._clock.sleep(RETRY_S)

    async def resign(self) -> None:
        """Lead no more, for good; whoever is next need not wait for the lease to run out."""
        self.candidate.resign()
        lease, self._lease = self._lease, None
        self._note()
        await self._tasks.cancel()
        if lease is not None:
            await _revoke(lease)

    def _changed(self, key: str, record: LeaderRecord | None) -> None:
        if key == self._key:
            self._carry_out(self.candidate.heard(record))

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case Lock(attempt):
                    self._spawn(attempt, partial(self._lock, attempt))
                case ReadEpoch(attempt):
                    self._spawn(attempt, partial(self._read_epoch, attempt))
                case WriteEpoch(attempt):
                    self._spawn(attempt, partial(self._write_epoch, instruction))
                case Announce(attempt):
                    self._spawn(attempt, partial(self._announce, instruction))
                case Verify(attempt):
                    self._spawn(attempt, partial(self._verify, attempt))
                case Unlock():
                    self._unlock()
                case TryLater():
                    pass  # `run` tries again and again
        self._note()

    def _spawn(self, attempt: int, step: Callable[[], Awaitable[list[Instruction]]]) -> None:
        self._tasks.spawn(self._try(attempt, step), name=f"attempt {attempt}")

    async def _try(self, attempt: int, step: Callable[[], Awaitable[list[Instruction]]]) -> None:
        try:
            instructions = await step()
        except StoreError as error:
            log.warning("no leader can be chosen now", extra={"duty": self.duty, "error": str(error)})
            instructions = self.candidate.failed(attempt)
        self._carry_out(instructions)

    async def _lock(self, attempt: int) -> list[Instruction]:
        lease = await self._store.grant_lease(LEADER_TTL_S)
        revision = None
        try:
            former = await self._former_life()
            revision = await self._store.compare_and_swap(self._key, former, msgspec.json.encode(self._me), lease=lease)
        finally:
            if revision is None:
                await _revoke(lease)
        if revision is None:
            return self.candidate.locked(attempt, None)
        self._lease, self._lock_revision = lease, revision
        self._tasks.spawn(self._watch_lease(lease, attempt), name="lease")
        return self.candidate.locked(attempt, lease.held_until_s)

    async def _former_life(self) -> int:
        """Revision of the key if this member's former incarnation holds it, so that a restart need not wait for the
        lease of the process that died; 0 otherwise. If it should live after all, its epoch is the lower one."""
        entry = await self._store.get(self._key)
        record = None if entry is None else _record_of(entry.value)
        return entry.mod_revision if entry and record and record.member_id == self._me.member_id else 0

    async def _read_epoch(self, attempt: int) -> list[Instruction]:
        entry = await self._store.get(EPOCHS_PREFIX + self.duty)
        epoch, revision = (0, 0) if entry is None else (_epoch_of(entry.value), entry.mod_revision)
        return self.candidate.read(attempt, epoch, revision, int(1000 * self._clock.unix_s()))

    async def _write_epoch(self, step: WriteEpoch) -> list[Instruction]:
        value = msgspec.json.encode(EpochRecord(step.epoch))
        revision = await self._store.compare_and_swap(EPOCHS_PREFIX + self.duty, step.expected_revision, value)
        return self.candidate.fenced(step.attempt, revision is not None)

    async def _announce(self, step: Announce) -> list[Instruction]:
        since_ms = int(1000 * self._clock.unix_s())
        record = msgspec.structs.replace(self._me, epoch=step.epoch, since_unix_ms=since_ms)
        revision = await self._store.compare_and_swap(
            self._key, self._lock_revision, msgspec.json.encode(record), lease=self._lease
        )
        return self.candidate.announced(step.attempt, revision is not None)

    async def _verify(self, attempt: int) -> list[Instruction]:
        entry = await self._store.get(self._key)
        return self.candidate.verified(attempt, None if entry is None else _record_of(entry.value))

    async def _watch_lease(self, lease: Lease, attempt: int) -> None:
        await lease.wait_lost()
        self._carry_out(self.candidate.lease_lost(attempt))

    def _unlock(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._tasks.spawn(_revoke(lease), name="unlock")

    def _note(self) -> None:
        leads = self.is_leading
        if leads == self._led:
            return
        self._led = leads
        self._metrics.leading.labels(self.duty).set(leads)
        self._metrics.changes.labels(self.duty, "gained" if leads else "lost").inc()
        if leads:
            self._metrics.epoch.labels(self.duty).set(self.epoch)
            log.warning("leading", extra={"duty": self.duty, "epoch": self.epoch})
        else:
            log.warning("leading no more", extra={"duty": self.duty, "epoch": self.epoch})
        self._on_change(leads)


def lead(
    context: RoleContext, duty: str, metrics: LeadershipMetrics, on_change: Callable[[bool], None] = lambda _: None
) -> Leadership:
    """A candidate for the duty in this role's name. It does nothing before `run`. `on_change` as `Leadership`'s."""
    me = LeaderRecord(duty, context.member_id, context.incarnation_id, context.address)
    return Leadership(context.store, me, context.runtime.clock, metrics, on_change)


async def leaders(store: StateStore) -> dict[str, LeaderRecord]:
    """The present leader of every duty, read from the store. Raises `StoreError`."""
    listing = await store.range(LEADERS_PREFIX)
    records = [_record_of(entry.value) for entry in listing.entries]
    return {record.duty: record for record in records if record is not None and record.epoch}


async def _revoke(lease: Lease) -> None:
    try:
        await lease.revoke()
    except StoreError as error:
        log.info("a lease could not be revoked and will run out", extra={"error": str(error)})


def _record_of(value: bytes) -> LeaderRecord | None:
    try:
        return msgspec.json.decode(value, type=LeaderRecord)
    except msgspec.MsgspecError:
        return None


def _epoch_of(value: bytes) -> int:
    try:
        return msgspec.json.decode(value, type=EpochRecord).epoch
    except msgspec.MsgspecError:
        log.exception("the epoch of a duty cannot be read; it begins again from the wall clock")
        return 0
