"""Who is in the mesh: every process announces itself under a lease, and everyone watches the announcements."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from mesh.errors import DeadlineExceeded, StoreCompacted, StoreError
from mesh.store.interface import StateStore, WatchEvent
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

MEMBERS_PREFIX = "/penstock/members/"
LEASE_TTL_S = 5
RETRY_S = 0.5
GRACE_S = float(LEASE_TTL_S)
"""A store that forgot its leases when it restarted is told of all living members again within this time."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process of the mesh."""

    role: str
    member_id: str
    incarnation_id: str
    """Fresh at every start: a restarted member is another one."""
    address: str
    """host:port of its gRPC server."""
    metrics_address: str
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Where it stands in the state store."""
        return f"{MEMBERS_PREFIX}{self.role}/{self.member_id}"


class ChangeKind(StrEnum):
    """What happened to a member."""

    JOINED = "joined"
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A member that came or went. A restart under the same id is a LEFT followed by a JOINED."""

    kind: ChangeKind
    member: Member


class Announcement:
    """Keeps one member announced: takes a lease, writes the record, and does both again whenever the lease is
    lost (a store that was away for longer than the lease lives)."""

    def __init__(self, store: StateStore, member: Member) -> None:
        self._store = store
        self._member = member
        self._tasks = TaskSet("announcement")
        self._announced = asyncio.Event()

    async def start(self) -> None:
        """Return once the record is written, however long the store takes to appear."""
        self._tasks.spawn(self._keep(), name=self._member.member_id)
        await self._announced.wait()

    async def withdraw(self) -> None:
        """Take the record back, so that nobody need wait for the lease to run out."""
        await self._tasks.cancel()
        try:
            await self._store.delete(self._member.key)
        except StoreError as error:
            log.warning("could not withdraw from the mesh; the lease will run out", extra={"error": str(error)})

    async def _keep(self) -> None:
        while True:
            try:
                lease = await self._store.grant_lease(LEASE_TTL_S)
                await self._store.put(self._member.key, msgspec.json.encode(self._member), lease=lease)
                self._announced.set()
                log.info("announced", extra={"key": self._member.key, "lease": lease.incarnation_id})
                loss = await lease.wait_lost()
                log.warning("announcing again: the lease was lost", extra={"key": self._member.key, "loss": loss})
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)


class Directory:
    """A live view of the members, from a watch on the state store.

    While the store is away the last known members stay, because serving must go on without it; and so do those that it
    does not know when it is back, until they have had the time to announce themselves again.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._members: dict[str, Member] = {}
        self._callbacks: list[Callable[[MemberChange], None]] = []
        self._tasks = TaskSet("directory")
        self._listed = asyncio.Event()
        self._missing: dict[str, asyncio.TimerHandle] = {}
        """By key: members that the store did not know when it was back."""

    async def start(self) -> None:
        """Return once the members present now are known."""
        self._tasks.spawn(self._watch(), name="watch")
        await self._listed.wait()

    async def stop(self) -> None:
        """End the watch."""
        await self._tasks.cancel()
        for key in list(self._missing):
            self._missing.pop(key).cancel()

    def members(self, role: str) -> tuple[Member, ...]:
        """The members with a role, by id."""
        found = (member for member in self._members.values() if member.role == role)
        return tuple(sorted(found, key=lambda member: member.member_id))

    def subscribe(self, callback: Callable[[MemberChange], None]) -> Callable[[], None]:
        """Call `callback` on the event loop for all members present and then for each change; returns what
        ends the subscription."""
        self._callbacks.append(callback)
        for member in list(self._members.values()):
            callback(MemberChange(ChangeKind.JOINED, member))
        return lambda: self._callbacks.remove(callback)

    async def wait_for(self, role: str, count: int, timeout_s: float) -> tuple[Member, ...]:
        """The members with a role, once there are at least `count`. Raises DeadlineExceeded."""
        changed = asyncio.Event()
        unsubscribe = self.subscribe(lambda _: changed.set())
        try:
            async with asyncio.timeout(timeout_s):
                while len(found := self.members(role)) < count:
                    changed.clear()
                    await changed.wait()
                return found
        except TimeoutError:
            present = len(self.members(role))
            raise DeadlineExceeded(
                f"{present} of {count} {role} processes had joined the mesh after {timeout_s:g} s; see their logs"
            ) from None
        finally:
            unsubscribe()

    async def _watch(self) -> None:
        while True:
            try:
                revision = await self._list()
                async with aclosing(self._store.watch(MEMBERS_PREFIX, revision + 1)) as events:
                    async for event in events:
                        self._apply(event)
                return
            except StoreCompacted as error:
                log.info("listing the members again", extra={"reason": str(error)})
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _list(self) -> int:
        revision, entries = await self._store.range(MEMBERS_PREFIX)
        for key in self._members.keys() - {entry.key for entry in entries}:
            self._miss(key)
        for entry in entries:
            self._joined(entry.key, entry.value)
        self._listed.set()
        return revision

    def _apply(self, event: WatchEvent) -> None:
        if event.kind == "put":
            self._joined(event.key, event.value)
        elif event.is_inferred:
            self._miss(event.key)
        else:
            self._left(event.key)

    def _miss(self, key: str) -> None:
        """The store does not know it any more; a member that lives will say so."""
        log.warning("a member is missing in the state store", extra={"key": key, "grace_s": GRACE_S})
        self._found(key)
        self._missing[key] = asyncio.get_running_loop().call_later(GRACE_S, self._left, key)

    def _found(self, key: str) -> None:
        handle = self._missing.pop(key, None)
        if handle is not None:
            handle.cancel()

    def _joined(self, key: str, value: bytes) -> None:
        self._found(key)
        try:
            member = msgspec.json.decode(value, type=Member)
        except msgspec.MsgspecError as error:
            log.error("a membership record cannot be read", extra={"key": key, "error": str(error)})
            return
        known = self._members.get(key)
        if known == member:
            return
        if known is not None:
            self._left(key)
        self._members[key] = member
        self._tell(MemberChange(ChangeKind.JOINED, member))

    def _left(self, key: str) -> None:
        self._found(key)
        member = self._members.pop(key, None)
        if member is not None:
            self._tell(MemberChange(ChangeKind.LEFT, member))

    def _tell(self, change: MemberChange) -> None:
        for callback in list(self._callbacks):
            callback(change)
