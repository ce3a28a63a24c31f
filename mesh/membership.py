"""Who is in the mesh: every process announces itself under a lease (`announcement.py`), and those watch who need it."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import msgspec

from mesh.errors import DeadlineExceeded, StoreCompacted, StoreError
from mesh.store.interface import StateStore, WatchEvent
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

MEMBERS_PREFIX = "/penstock/members/"
LEASE_TTL_S = 5
RETRY_S = 0.5
GRACE_S = float(LEASE_TTL_S)
"""Time for a member whose record is gone to announce itself again."""
WITHDRAWN = b""
"""Stands in place of a member's record while the member leaves: a record that is merely gone may be one that somebody
deleted, whose member lives."""
FOLLOWED_AT_START: Mapping[str, frozenset[str]] = MappingProxyType(
    {"worker": frozenset({"monitor", "scheduler", "predictor"})}
)
"""By role, the roles that its processes follow from their start; all of them where it is not named. Workers are many,
and what each of them heard of all others would grow with the square of the mesh: they follow those once needed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the mesh as its record in the store describes it."""

    role: str
    member_id: str
    incarnation_id: str
    """Fresh at every start: a restarted member is another one."""
    address: str
    """host:port of its gRPC server."""
    metrics_address: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    generation: int = 0
    """Orders the incarnations of a member: the highest is the member. 0 until it is announced; see `Claim`."""

    @property
    def key(self) -> str:
        """The record's key in the state store."""
        return f"{MEMBERS_PREFIX}{self.role}/{self.member_id}"


class ChangeKind(StrEnum):
    """How a member's record has changed since it was last seen."""

    JOINED = "joined"
    CHANGED = "changed"
    """It is the same process, and what it has does not end; what stands in its record is new: its address, say."""
    LEFT = "left"


@dataclass(frozen=True, slots=True)
class MemberChange:
    """A member that came, went, or has a new record. A restart under the same id is a LEFT followed by a JOINED."""

    kind: ChangeKind
    member: Member


class Directory:
    """A live view of the members of some roles, from watches on the state store.

    While the store is away the last known members stay, because serving must go on without it. A member whose record is
    gone stays until it has had `GRACE_S` to announce itself again to a store that answers: the store may have lost its
    data, or somebody deleted the key. Only a member that withdraws leaves at once.
    """

    def __init__(self, store: StateStore, roles: Iterable[str] | None = None) -> None:
        """`roles` are followed from the start, all if there are none named."""
        self._store = store
        self._at_start = (MEMBERS_PREFIX,) if roles is None else tuple(map(_prefix, sorted(roles)))
        self._members: dict[str, Member] = {}
        self._callbacks: list[Callable[[MemberChange], None]] = []
        self._tasks = TaskSet("directory")
        self._listed: dict[str, asyncio.Event] = {}
        """By prefix that is watched: whether what was there has been read."""
        self._missing: dict[str, asyncio.Task[None]] = {}
        """Members whose record is gone, by key."""

    async def start(self) -> None:
        """Return once the members present now are known."""
        for listed in [self._follow(prefix) for prefix in self._at_start]:
            await listed.wait()

    async def follow(self, role: str) -> None:
        """Follow the members with a role from now on, if that is not done; return once those present are known, however
        long the store takes."""
        await self._follow(self._prefix_of(role)).wait()

    def knows(self, role: str) -> bool:
        """Whether the members with a role have been read, and are followed."""
        listed = self._listed.get(self._prefix_of(role))
        return listed is not None and listed.is_set()

    async def stop(self) -> None:
        """End the watches. What is known stays readable."""
        await self._tasks.cancel()

    def members(self, role: str) -> tuple[Member, ...]:
        """The members with a role, by id; none of a role that is not followed."""
        found = (member for member in self._members.values() if member.role == role)
        return tuple(sorted(found, key=lambda member: member.member_id))

    @property
    def missing(self) -> int:
        """Members whose record is gone, and that may be alive."""
        return len(self._missing)

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

    def _prefix_of(self, role: str) -> str:
        return MEMBERS_PREFIX if MEMBERS_PREFIX in self._at_start else _prefix(role)

    def _follow(self, prefix: str) -> asyncio.Event:
        if prefix not in self._listed:
            self._listed[prefix] = asyncio.Event()
            self._tasks.spawn(self._watch(prefix), name=f"watch {prefix}")
        return self._listed[prefix]

    async def _watch(self, prefix: str) -> None:
        while True:
            try:
                revision = await self._list(prefix)
                async with aclosing(self._store.watch(prefix, revision + 1)) as events:
                    async for event in events:
                        self._apply(event)
                return
            except StoreCompacted as error:
                log.info("listing the members again", extra={"reason": str(error)})
            except StoreError as error:
                log.warning("the state store cannot be reached; trying again", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _list(self, prefix: str) -> int:
        revision, entries = await self._store.range(prefix)
        known = {key for key in self._members if key.startswith(prefix)}
        for key in sorted(known - {entry.key for entry in entries}):
            self._miss(key)
        for entry in entries:
            self._joined(entry.key, entry.value)
        self._listed[prefix].set()
        return revision

    def _apply(self, event: WatchEvent) -> None:
        if event.kind == "put":
            self._joined(event.key, event.value)
        else:
            self._miss(event.key)

    def _miss(self, key: str) -> None:
        """The store does not know it any more; a member that lives will say so."""
        if key not in self._members or key in self._missing:
            return
        log.warning("a member is missing in the state store", extra={"key": key, "grace_s": GRACE_S})
        self._missing[key] = self._tasks.spawn(self._await_return(key), name=f"missing {key}")

    async def _await_return(self, key: str) -> None:
        """A store that does not answer cannot be written to either, so the time then begins anew."""
        while True:
            await asyncio.sleep(GRACE_S)
            try:
                entry = await self._store.get(key)
            except StoreError as error:
                log.warning("a missing member is kept: the store does not answer", extra={"error": str(error)})
                continue
            del self._missing[key]
            if entry is None:
                self._left(key)
            else:
                self._joined(key, entry.value)
            return

    def _found(self, key: str) -> None:
        task = self._missing.pop(key, None)
        if task is not None:
            task.cancel()

    def _joined(self, key: str, value: bytes) -> None:
        self._found(key)
        if value == WITHDRAWN:
            self._left(key)
            return
        try:
            member = msgspec.json.decode(value, type=Member)
        except msgspec.MsgspecError as error:
            log.error("a membership record cannot be read", extra={"key": key, "error": str(error)})
            return
        known = self._members.get(key)
        if known == member:
            return
        if known is not None and known.incarnation_id == member.incarnation_id:
            self._members[key] = member
            log.info("a member has a new record", extra={"key": key, "address": member.address})
            self._tell(MemberChange(ChangeKind.CHANGED, member))
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


def _prefix(role: str) -> str:
    """Of the keys of its members."""
    return f"{MEMBERS_PREFIX}{role}/"
