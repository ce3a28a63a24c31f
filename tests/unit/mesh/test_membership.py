import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest

from mesh import membership
from mesh.announcement import Announcement
from mesh.errors import DeadlineExceeded
from mesh.membership import MEMBERS_PREFIX, WITHDRAWN, ChangeKind, Directory, Member, MemberChange
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost

pytestmark = pytest.mark.live


def worker(member_id: str, incarnation_id: str = "1") -> Member:
    return Member("worker", member_id, incarnation_id, "127.0.0.1:1", "127.0.0.1:2", {"model": "m"})


@pytest.fixture
async def host() -> AsyncIterator[StoreHost]:
    host = StoreHost(SystemClock(), SystemEntropy())
    yield host
    host.close()


@pytest.fixture
async def directory(host: StoreHost) -> AsyncIterator[Directory]:
    directory = Directory(EmbeddedStore(host))
    await directory.start()
    yield directory
    await directory.stop()


class Changes:
    """The changes a subscriber saw, and a way to wait for the next ones."""

    def __init__(self, directory: Directory) -> None:
        self.queue: asyncio.Queue[MemberChange] = asyncio.Queue()
        directory.subscribe(self.queue.put_nowait)

    async def next(self) -> tuple[ChangeKind, str, str]:
        change = await asyncio.wait_for(self.queue.get(), 5)
        return change.kind, change.member.member_id, change.member.incarnation_id


async def test_members_come_and_go(host: StoreHost, directory: Directory) -> None:
    changes = Changes(directory)
    announcement = Announcement(EmbeddedStore(host), worker("w0"))
    await announcement.start()
    assert await changes.next() == (ChangeKind.JOINED, "w0", "1")
    assert directory.members("worker") == (announcement.member,)
    assert directory.members("frontend") == ()
    await announcement.withdraw()
    assert await changes.next() == (ChangeKind.LEFT, "w0", "1")
    assert directory.members("worker") == ()


async def test_a_restart_under_the_same_id_leaves_and_joins(host: StoreHost, directory: Directory) -> None:
    changes = Changes(directory)
    first = Announcement(EmbeddedStore(host), worker("w0", "1"))
    await first.start()
    second = Announcement(EmbeddedStore(host), worker("w0", "2"))
    await second.start()
    seen = [await changes.next() for _ in range(3)]
    assert seen == [(ChangeKind.JOINED, "w0", "1"), (ChangeKind.LEFT, "w0", "1"), (ChangeKind.JOINED, "w0", "2")]
    await second.withdraw()
    await first.withdraw()


async def test_a_late_subscriber_hears_of_those_present(host: StoreHost, directory: Directory) -> None:
    announcement = Announcement(EmbeddedStore(host), worker("w0"))
    await announcement.start()
    await directory.wait_for("worker", 1, timeout_s=5)
    assert await Changes(directory).next() == (ChangeKind.JOINED, "w0", "1")
    await announcement.withdraw()


async def test_members_have_time_to_announce_themselves_to_a_store_that_forgot_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "GRACE_S", 0.5)
    former, host = StoreHost(SystemClock(), SystemEntropy()), StoreHost(SystemClock(), SystemEntropy())
    store = EmbeddedStore(former)
    for name in ("alive", "dead"):
        await store.put(worker(name).key, msgspec.json.encode(worker(name)))
    directory = Directory(store)
    await directory.start()
    changes = Changes(directory)
    assert {(await changes.next())[1] for _ in range(2)} == {"alive", "dead"}
    store._host = store._source._host = host
    former.close()
    await store.put(worker("new").key, msgspec.json.encode(worker("new")))
    assert await changes.next() == (ChangeKind.JOINED, "new", "1"), "the others have not left"
    await store.put(worker("alive").key, msgspec.json.encode(worker("alive")))
    assert await changes.next() == (ChangeKind.LEFT, "dead", "1")
    assert [member.member_id for member in directory.members("worker")] == ["alive", "new"]
    assert changes.queue.empty()
    await directory.stop()
    host.close()


async def test_members_of_a_role_are_followed_once_somebody_needs_them(host: StoreHost) -> None:
    store = EmbeddedStore(host)
    directory = Directory(store, ("monitor", "scheduler"))
    changes, monitor = Changes(directory), replace(worker("m0"), role="monitor")
    for member in (worker("w0"), monitor):
        await store.put(member.key, msgspec.json.encode(member))
    await directory.start()
    await store.put(worker("w1").key, msgspec.json.encode(worker("w1")))
    await store.put(replace(monitor, member_id="m1").key, msgspec.json.encode(replace(monitor, member_id="m1")))
    assert [(await changes.next())[1] for _ in range(2)] == ["m0", "m1"], "the workers are not heard of"
    assert (directory.members("worker"), directory.knows("worker"), directory.knows("monitor")) == ((), False, True)
    await directory.follow("worker")
    assert [member.member_id for member in directory.members("worker")] == ["w0", "w1"]
    assert directory.knows("worker")
    await directory.follow("worker")
    await store.put(worker("w1").key, WITHDRAWN)
    assert [await changes.next() for _ in range(3)] == [
        (ChangeKind.JOINED, "w0", "1"),
        (ChangeKind.JOINED, "w1", "1"),
        (ChangeKind.LEFT, "w1", "1"),
    ]
    assert [member.member_id for member in directory.members("monitor")] == ["m0", "m1"], "listing workers misses none"
    assert directory.missing == 0
    await directory.stop()


async def test_an_unreadable_record_is_left_out(host: StoreHost, directory: Directory) -> None:
    await EmbeddedStore(host).put(f"{MEMBERS_PREFIX}worker/bad", b"not json")
    announcement = Announcement(EmbeddedStore(host), worker("good"))
    await announcement.start()
    await directory.wait_for("worker", 1, timeout_s=5)
    assert [member.member_id for member in directory.members("worker")] == ["good"]
    await announcement.withdraw()


async def test_waiting_for_members_has_a_bound(directory: Directory) -> None:
    with pytest.raises(DeadlineExceeded, match="0 of 1 worker"):
        await directory.wait_for("worker", 1, timeout_s=0.01)
