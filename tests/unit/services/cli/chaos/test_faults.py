"""What happens to a mesh as a whole."""

import signal
import sys
from asyncio import create_subprocess_exec, subprocess

import pytest

from mesh.errors import PeerUnavailable
from mesh.membership import MEMBERS_PREFIX, Directory, Member
from mesh.runtime import SystemClock, SystemEntropy
from mesh.store.embedded import EmbeddedStore
from mesh.store.host import StoreHost
from services.cli.chaos import faults
from services.cli.chaos.faults import TargetMesh, broken, victims

pytestmark = pytest.mark.live


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("AFTERMATH_S", "PAUSE_BETWEEN_S", "CUT_S"):
        monkeypatch.setattr(faults, name, 0.0)
    return []


async def scene(said: list[str]) -> TargetMesh:
    store = EmbeddedStore(StoreHost(SystemClock(), SystemEntropy()))
    directory = Directory(store)
    await directory.start()
    return TargetMesh(directory, store, "m", said.append)


async def test_a_wiped_store_gets_its_settings_back_and_nothing_else(said: list[str]) -> None:
    there = await scene(said)
    lease = await there.store.grant_lease(5)
    await there.store.put("/penstock/config/policy", b"lmetric")
    await there.store.put(f"{MEMBERS_PREFIX}worker/w", b"{}", lease=lease)
    async with broken("wipe-store", 1, there):
        left = (await there.store.range("/")).entries
    assert [(entry.key, entry.value) for entry in left] == [("/penstock/config/policy", b"lmetric")]
    assert said == ["deleted all 2 keys of the state store", "put back 1 settings, as from a backup"]
    await there.directory.stop()


async def test_members_lose_their_records_and_keep_their_leases(said: list[str]) -> None:
    there = await scene(said)
    lease = await there.store.grant_lease(5)
    await there.store.put("/penstock/config/policy", b"lmetric")
    await there.store.put(f"{MEMBERS_PREFIX}worker/w", b"{}", lease=lease)
    async with broken("delete-members", 1, there):
        left = (await there.store.range("/")).entries
    assert [entry.key for entry in left] == ["/penstock/config/policy"]
    assert lease.loss is None
    await there.directory.stop()


async def test_what_was_stopped_goes_on_though_it_was_broken_for_nothing(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await create_subprocess_exec(sys.executable, "-c", "input()", "serve", "monitor", stdin=subprocess.PIPE)
    monitor = Member("monitor", "m", "1", "127.0.0.1:7000", "", {"pid": str(process.pid)})
    gone = Member("monitor", "n", "1", "192.0.2.1:7000", "", {"pid": "1"})
    there = await scene(said)
    monkeypatch.setattr(there.directory, "members", lambda role: (monitor, gone))
    with pytest.raises(PeerUnavailable, match="not on this machine"):
        async with broken("cut-monitor", 1, there):
            pass
    assert process.stdin is not None
    process.stdin.close()
    # Were it stopped still, it would not end.
    assert await process.wait() != -signal.SIGKILL
    await there.directory.stop()


def test_the_busiest_are_broken_and_one_is_left() -> None:
    workers = [Member("worker", name, "1", "", "") for name in "abc"]
    requests = {"a": 1, "b": 5, "c": 5}
    assert [worker.member_id for worker in victims(workers, requests, 2)] == ["b", "c"]
    with pytest.raises(PeerUnavailable, match="3 of 3 workers cannot be broken: 1 of them must be left"):
        victims(workers, requests, 3)


def test_those_who_come_back_may_be_broken_all_together() -> None:
    workers = [Member("worker", name, "1", "", "") for name in "ab"]
    assert len(victims(workers, {}, 2, spared=0)) == 2
    with pytest.raises(PeerUnavailable, match="3 of 2 workers cannot be broken"):
        victims(workers, {}, 3, spared=0)
