import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh import announcement as announcing
from mesh import membership
from mesh.announcement import Announcement, Claim, Kept, Superseded, Write
from mesh.membership import MEMBERS_PREFIX, ChangeKind, Directory, Member, MemberChange
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from mesh.store.interface import KeyValue, Listing

pytestmark = pytest.mark.live

CLAIMANTS = 3


def worker(incarnation_id: str = "1", member_id: str = "w0") -> Member:
    return Member("worker", member_id, incarnation_id, "127.0.0.1:1", "127.0.0.1:2", {"model": "m"})


KEY = worker().key


class OneKey:
    """A store's revision and one key of it."""

    def __init__(self) -> None:
        self.revision = 1
        self.entry: KeyValue | None = None

    def listing(self) -> Listing:
        return Listing(self.revision, () if self.entry is None else (self.entry,))

    def put(self, value: bytes, lease_id: str) -> None:
        self.revision += 1
        self.entry = KeyValue(KEY, value, self.revision, lease_id)

    def delete(self) -> None:
        self.revision += 1
        self.entry = None

    def wipe(self) -> None:
        self.revision, self.entry = 1, None


class Process:
    """One that claims the key, step by step; what it writes may be late."""

    def __init__(self, number: int, store: OneKey) -> None:
        self.claim = Claim(worker(f"incarnation-{number}"))
        self.lease_id = f"lease-{number}"
        self.store = store
        self.pending: Write | None = None
        self.writes = 0

    @property
    def has_given_way(self) -> bool:
        return self.claim.superseded is not None

    def look(self) -> None:
        step = self.claim.look(self.store.listing(), self.lease_id)
        self.pending = step if isinstance(step, Write) else None

    def write(self, *, is_answered: bool = True) -> None:
        write, self.pending = self.pending, None
        there = 0 if self.store.entry is None else self.store.entry.mod_revision
        if write is None or write.expected_mod_revision != there:
            return
        self.store.put(msgspec.json.encode(write.member), self.lease_id)
        self.writes += 1
        if is_answered:
            self.claim.written()


ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from(["look", "write", "write without an answer", "new lease"]), st.integers(0, CLAIMANTS - 1)
    ),
    st.tuples(st.sampled_from(["delete", "wipe", "garbage", "record without a lease"]), st.just(0)),
)


@given(st.lists(ACTIONS, max_size=60))
def test_however_many_claim_a_name_one_keeps_it_and_the_others_give_way(actions: list[tuple[str, int]]) -> None:
    store = OneKey()
    processes = [Process(number, store) for number in range(CLAIMANTS)]
    for action, number in actions:
        process = processes[number]
        match action:
            case "look":
                process.look()
            case "write":
                process.write()
            case "write without an answer":
                process.write(is_answered=False)
            case "new lease":
                process.lease_id += "+"
            case "delete":
                store.delete()
            case "wipe":
                store.wipe()
            case "garbage":
                store.put(b"not json", "")
            case "record without a lease" if store.entry is not None:
                store.put(store.entry.value, "")
    written = sum(process.writes for process in processes)
    for _ in range(CLAIMANTS + 2):  # nobody disturbs them any more
        for process in processes:
            process.look()
            process.write()
    keepers = [process for process in processes if not process.has_given_way]
    assert len(keepers) == 1
    assert isinstance(keepers[0].claim.look(store.listing(), keepers[0].lease_id), Kept)
    assert store.entry is not None
    assert store.entry.incarnation_id == keepers[0].lease_id
    assert sum(process.writes for process in processes) - written <= 2 * CLAIMANTS, "they fight"


def test_a_successor_is_not_overwritten_even_where_its_key_was_deleted_and_the_old_life_saw_it_first() -> None:
    store = OneKey()
    old, new = Process(0, store), Process(1, store)
    for process in (old, new):
        process.look()
        process.write()
    store.delete()
    old.look()  # was cut off since before its successor came
    old.write()
    new.look()
    assert not new.has_given_way
    new.write()
    old.look()
    assert old.has_given_way
    assert not new.has_given_way


@pytest.fixture
async def host(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StoreHost]:
    for module in (membership, announcing):
        monkeypatch.setattr(module, "RETRY_S", 0.02)
    host = StoreHost(SystemClock(), SystemEntropy())
    yield host
    host.close()


class Onlooker:
    """What a directory told of its members."""

    def __init__(self, host: StoreHost) -> None:
        self.directory = Directory(EmbeddedStore(host))
        self.changes: list[tuple[ChangeKind, str]] = []
        self.changed = asyncio.Event()

    async def start(self) -> None:
        await self.directory.start()
        self.directory.subscribe(self._hear)

    def _hear(self, change: MemberChange) -> None:
        self.changes.append((change.kind, change.member.incarnation_id))
        self.changed.set()

    async def until(self, count: int) -> list[tuple[ChangeKind, str]]:
        async with asyncio.timeout(5):
            while len(self.changes) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.changes


@pytest.fixture
async def onlooker(host: StoreHost) -> AsyncIterator[Onlooker]:
    onlooker = Onlooker(host)
    await onlooker.start()
    yield onlooker
    await onlooker.directory.stop()


async def written(store: EmbeddedStore, revision: int) -> KeyValue:
    """The record, once it was written after that revision."""
    async with asyncio.timeout(5):
        async for event in store.watch(KEY, revision + 1):
            if event.kind == "put" and event.value != membership.WITHDRAWN:
                return KeyValue(event.key, event.value, event.mod_revision, event.incarnation_id)
    raise AssertionError("the watch has ended")


@pytest.mark.parametrize(
    "damage", ["one key deleted", "all keys deleted", "compacted", "overwritten", "garbage", "lease revoked"]
)
async def test_a_record_that_is_gone_or_not_its_own_is_written_again_and_nobody_takes_the_member_for_gone(
    host: StoreHost, onlooker: Onlooker, damage: str
) -> None:
    reasons: list[str] = []
    announcement = Announcement(EmbeddedStore(host), worker(), reasons.append)
    await announcement.start()
    await onlooker.until(1)
    store = EmbeddedStore(host)
    before = await store.get(KEY)
    assert before is not None
    match damage:
        case "one key deleted":
            await store.delete(KEY)
        case "all keys deleted":
            await store.delete_prefix("")
        case "compacted":
            host.delete(KEY)
            host.compact(host.revision)
        case "overwritten":
            await store.put(
                KEY, msgspec.json.encode(replace(announcement.member, incarnation_id="zombie", generation=0))
            )
        case "garbage":
            await store.put(KEY, b"not json")
        case "lease revoked":
            host.revoke_lease(before.incarnation_id)
    is_ahead = damage in ("overwritten", "compacted")
    after = await written(store, host.revision if is_ahead else before.mod_revision + 1)
    while msgspec.json.decode(after.value) != msgspec.json.decode(before.value):
        after = await written(store, after.mod_revision)
    assert (after.incarnation_id == before.incarnation_id) == (damage != "lease revoked")
    assert len(reasons) == 2
    assert (ChangeKind.LEFT, "1") not in onlooker.changes or damage == "overwritten"
    await announcement.withdraw()


async def test_whoever_deletes_a_record_again_and_again_does_not_have_it_written_without_end(host: StoreHost) -> None:
    host_store = EmbeddedStore(host)
    times: list[float] = []
    loop = asyncio.get_running_loop()
    announcement = Announcement(EmbeddedStore(host), worker(), lambda _: times.append(loop.time()))
    await announcement.start()
    while len(times) < 5:
        await host_store.delete(KEY)
    await announcement.withdraw()
    assert min(after - before for before, after in pairwise(times)) >= announcing.RETRY_S


async def test_a_process_whose_name_is_taken_gives_way_and_lets_the_successor_stand(
    host: StoreHost, onlooker: Onlooker
) -> None:
    first = Announcement(EmbeddedStore(host), worker("1"))
    second = Announcement(EmbeddedStore(host), worker("2"))
    await first.start()
    await second.start()
    async with asyncio.timeout(5):
        assert (await first.wait_superseded()).incarnation_id == "2"
    await first.withdraw()
    assert await onlooker.until(3) == [(ChangeKind.JOINED, "1"), (ChangeKind.LEFT, "1"), (ChangeKind.JOINED, "2")]
    entry = await EmbeddedStore(host).get(KEY)
    assert entry is not None
    assert msgspec.json.decode(entry.value, type=Member) == second.member
    await second.withdraw()
    assert (await onlooker.until(4))[3] == (ChangeKind.LEFT, "2")


async def test_a_new_address_of_the_same_process_is_told_as_a_change(host: StoreHost, onlooker: Onlooker) -> None:
    announcement = Announcement(EmbeddedStore(host), worker())
    await announcement.start()
    announcement.change(replace(worker(), address="127.0.0.2:1"))
    assert await onlooker.until(2) == [(ChangeKind.JOINED, "1"), (ChangeKind.CHANGED, "1")]
    assert [member.address for member in onlooker.directory.members("worker")] == ["127.0.0.2:1"]
    await announcement.withdraw()


async def test_members_alike_in_their_first_letters_are_told_apart(host: StoreHost) -> None:
    longer = Announcement(EmbeddedStore(host), worker("9", "w01"))
    await longer.start()
    announcement = Announcement(EmbeddedStore(host), worker())
    await announcement.start()
    await announcement.withdraw()
    listing = await EmbeddedStore(host).range(MEMBERS_PREFIX)
    assert [entry.key for entry in listing.entries] == [f"{MEMBERS_PREFIX}worker/w01"]
    await longer.withdraw()


async def test_a_member_that_does_not_come_back_has_left_once_a_store_that_answers_has_not_heard_of_it(
    host: StoreHost, onlooker: Onlooker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "GRACE_S", 0.02)
    store = EmbeddedStore(host)
    await store.put(KEY, msgspec.json.encode(worker()))
    await onlooker.until(1)
    await store.delete(KEY)
    assert await onlooker.until(2) == [(ChangeKind.JOINED, "1"), (ChangeKind.LEFT, "1")]
    assert onlooker.directory.missing == 0


def test_a_superseded_claim_stays_so() -> None:
    store = OneKey()
    first, second = Process(0, store), Process(1, store)
    for process in (first, second):
        process.look()
        process.write()
    first.look()
    store.wipe()
    assert isinstance(first.claim.look(store.listing(), "lease"), Superseded)
