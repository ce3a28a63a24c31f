"""How a process keeps its record among the members of the mesh, whatever happens to the store or to the key."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from mesh.errors import LeaseLost, StoreError
from mesh.membership import LEASE_TTL_S, RETRY_S, WITHDRAWN, Member
from mesh.store.interface import KeyValue, Listing, StateStore
from mesh.store.lease import Lease
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

CHECK_S = 2.0
"""The record is looked at this often even if nothing is heard of it: a watch may be deaf for a while."""


@dataclass(frozen=True, slots=True)
class Kept:
    """No write is needed: the record in the store is as it should be."""


@dataclass(frozen=True, slots=True)
class Write:
    """The record must be written, if the key still has `expected_mod_revision` (0: is absent)."""

    member: Member
    expected_mod_revision: int
    reason: str


@dataclass(frozen=True, slots=True)
class Superseded:
    """Another process is the member now. This one must never write again."""

    successor: Member


class Claim:
    """What one process does about the record of its member id. Pure.

    Several processes may claim one id: a restarted one and its predecessor that was only cut off, or two that were
    given the same name by mistake. Each life of a member has a generation, higher than that of any record that it found
    when it was first announced, and the highest generation is the member: the others give way, for good, as soon as
    they see its record (Kafka fences static group members in the same way). The order does not rest on the revisions
    of the records: a key that is deleted is written again by whoever notices first, and that may be an old life.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        """As announced, or to be announced; without a generation until the first `look`."""
        self.superseded: Superseded | None = None
        self._announced = False

    def change(self, member: Member) -> None:
        """This incarnation announces another record from now on."""
        assert member.incarnation_id == self.member.incarnation_id, "another incarnation needs a claim of its own"
        self.member = replace(member, generation=self.member.generation)

    def written(self) -> None:
        """The store has taken the record that `look` asked for: from now on this life has its generation."""
        self._announced = True

    def look(self, listing: Listing, lease_id: str) -> Kept | Write | Superseded:
        """What to do, seeing the keys that begin with this member's."""
        if self.superseded is not None:
            return self.superseded
        entry = next((entry for entry in listing.entries if entry.key == self.member.key), None)
        there = _read(entry)
        if not self._announced and (there is None or there.incarnation_id != self.member.incarnation_id):
            # A store that was wiped counts from 1 again, so its revision alone would not do.
            former = 0 if there is None else there.generation
            self.member = replace(self.member, generation=max(listing.revision, former + 1))
        reason = self._reason(entry, there, lease_id)
        if isinstance(reason, Superseded):
            self.superseded = reason
            return reason
        if reason:
            return Write(self.member, entry.mod_revision if entry is not None else 0, reason)
        self.written()
        return Kept()

    def _reason(self, entry: KeyValue | None, there: Member | None, lease_id: str) -> str | Superseded:
        """Why the record must be written; empty if it need not."""
        if entry is None:
            return "missing" if self._announced else "new"
        if there is None:
            return "unreadable"
        if there.incarnation_id != self.member.incarnation_id:
            if _rank(there) > _rank(self.member):
                return Superseded(there)
            return "of another incarnation"
        if there != self.member:
            return "outdated"
        return "" if entry.incarnation_id == lease_id else "under another lease"


class Announcement:
    """Keeps one member announced: under a lease, and again whenever its record is gone or is not its own, until it is
    withdrawn or a successor of the same name is announced."""

    def __init__(self, store: StateStore, member: Member, on_written: Callable[[str], None] = lambda _: None) -> None:
        """`on_written` hears why the record was written, each time."""
        self._store = store
        self._claim = Claim(member)
        self._on_written = on_written
        self._tasks = TaskSet("announcement")
        self._announced = asyncio.Event()
        self._superseded = asyncio.Event()
        self._news = asyncio.Event()
        """Something may have happened to the record."""
        self._lease: Lease | None = None

    @property
    def member(self) -> Member:
        """The record as it is to stand in the store."""
        return self._claim.member

    async def start(self) -> None:
        """Return once the record is written, however long the store takes to appear."""
        self._tasks.spawn(self._keep(), name=self.member.member_id)
        self._tasks.spawn(self._watch(), name=f"watch {self.member.member_id}")
        await self._announced.wait()

    def change(self, member: Member) -> None:
        """Announce a changed record, such as a new address, under the same incarnation."""
        self._claim.change(member)
        self._news.set()

    async def wait_superseded(self) -> Member:
        """Return once another process of the same name and role is the member, with its record."""
        await self._superseded.wait()
        assert self._claim.superseded is not None, "set before the event"
        return self._claim.superseded.successor

    async def withdraw(self) -> None:
        """Take the record back, so that everybody knows at once that this process leaves; another's is let stand."""
        await self._tasks.cancel()
        lease = self._lease
        if lease is None or lease.loss is not None:
            return
        try:
            listing = await self._store.range(self.member.key)
            if not isinstance(self._claim.look(listing, lease.incarnation_id), Superseded):
                # A key that is only deleted would be waited for: its member may live.
                revision = _mod_revision(listing, self.member.key)
                await self._store.compare_and_swap(self.member.key, revision, WITHDRAWN, lease=lease)
            # Deletes what hangs on the lease and nothing else: a successor's record hangs on the successor's.
            await lease.revoke()
        except StoreError as error:
            log.warning("could not withdraw from the mesh; the lease will run out", extra={"error": str(error)})

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        written_s = -RETRY_S
        while True:
            try:
                self._news.clear()
                lease = await self._held_lease()
                step = self._claim.look(await self._store.range(self.member.key), lease.incarnation_id)
                if isinstance(step, Superseded):
                    await self._give_way(step, lease)
                    return
                if isinstance(step, Write):
                    # Once at a time: whoever deletes our key again and again must not have us flood the store.
                    await asyncio.sleep(written_s + RETRY_S - loop.time())
                    await self._write(step, lease)
                    written_s = loop.time()
                    continue
                self._announced.set()
                await self._wait(lease)
            except LeaseLost:
                if self._lease is not None:
                    self._lease.abandon()  # the store says so before the next refresh would
                await asyncio.sleep(RETRY_S)
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _held_lease(self) -> Lease:
        if self._lease is None or self._lease.loss is not None:
            if self._lease is not None:
                log.warning("a new lease: the last was lost", extra={"key": self.member.key, "loss": self._lease.loss})
            self._lease = await self._store.grant_lease(LEASE_TTL_S)
        return self._lease

    async def _write(self, write: Write, lease: Lease) -> None:
        key, value = write.member.key, msgspec.json.encode(write.member)
        if await self._store.compare_and_swap(key, write.expected_mod_revision, value, lease=lease) is None:
            return  # somebody was first: look again
        self._claim.written()
        self._on_written(write.reason)
        is_again = self._announced.is_set() and write.reason != "outdated"
        log.log(
            logging.WARNING if is_again else logging.INFO,
            "announced again" if is_again else "announced",
            extra={"key": key, "lease": lease.incarnation_id, "was": write.reason},
        )

    async def _wait(self, lease: Lease) -> None:
        """Until something may have happened to the record, or its lease is lost."""
        news = asyncio.ensure_future(self._news.wait())
        lost = asyncio.ensure_future(lease.wait_lost())
        try:
            await asyncio.wait((news, lost), timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            news.cancel()
            lost.cancel()

    async def _give_way(self, step: Superseded, lease: Lease) -> None:
        log.critical(
            "another process has taken this one's name, to which it gives way; each needs a member id of its own",
            extra={"key": self.member.key, "generation": self.member.generation, "successor": repr(step.successor)},
        )
        self._superseded.set()
        try:
            await lease.revoke()
        except StoreError as error:
            log.info("a lease without keys is left to run out", extra={"error": str(error)})

    async def _watch(self) -> None:
        while True:
            try:
                async with aclosing(self._store.watch(self.member.key)) as events:
                    async for event in events:
                        if event.key == self.member.key:
                            self._news.set()
                return  # the store was closed
            except StoreError as error:
                log.info("this member's record cannot be watched; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)


def _rank(member: Member) -> tuple[int, str]:
    """Ties are broken by the incarnation ids, which everybody sees alike."""
    return member.generation, member.incarnation_id


def _read(entry: KeyValue | None) -> Member | None:
    if entry is None:
        return None
    try:
        return msgspec.json.decode(entry.value, type=Member)
    except msgspec.MsgspecError:
        return None


def _mod_revision(listing: Listing, key: str) -> int:
    return next((entry.mod_revision for entry in listing.entries if entry.key == key), 0)
