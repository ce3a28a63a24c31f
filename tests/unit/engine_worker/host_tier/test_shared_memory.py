"""A host's store in a file that processes share: what outlives them, and what does not."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_worker.host_tier.index import NAME_BYTES
from engine_worker.host_tier.shared_memory import SharedMemory, remove_stores, slots_of
from engine_worker.host_tier.store import HostStore
from mesh.errors import HostTierUnavailable

BLOCK_BYTES = 4096
STORE_BYTES = 1 << 20

WRITER = """
import sys
from pathlib import Path
from engine_worker.host_tier.shared_memory import SharedMemory
from engine_worker.host_tier.store import HostStore
from tests.unit.engine_worker.host_tier.test_shared_memory import BLOCK_BYTES, STORE_BYTES, names_of, write
store = HostStore(SharedMemory(Path(sys.argv[1]), "k", BLOCK_BYTES, STORE_BYTES, lock_s=10.0))
print("ready", flush=True)
chain = 0
while True:
    chain += 1
    write(store, names_of(chain % 60, 8))
    store.unpin(store.pin(names_of(chain % 7, 8)))
"""


def names_of(chain: int, blocks: int) -> list[bytes]:
    return [bytes([chain, block]).ljust(NAME_BYTES, b"\7") for block in range(blocks)]


def byte_of(name: bytes) -> int:
    return (name[0] * 31 + name[1]) % 251


def write(store: HostStore, names: list[bytes]) -> int:
    found = store.reserve(names, 0, len(names))
    for which, slot in found:
        store.view(slot)[:] = byte_of(names[which])
    return store.commit([(slot, which) for which, slot in found])


def opened(directory: Path, store_bytes: int = STORE_BYTES, lock_s: float = 10.0) -> HostStore:
    return HostStore(SharedMemory(directory, "k", BLOCK_BYTES, store_bytes, lock_s=lock_s))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "stores"


def test_blocks_outlive_the_process_that_wrote_them(directory: Path) -> None:
    first = opened(directory)
    assert write(first, names_of(1, 3)) == 3
    first.close()
    second = opened(directory)
    assert second.store_id == first.store_id
    slots = second.pin(names_of(1, 3))
    assert [int(second.view(slot)[-1]) for slot in slots] == [byte_of(name) for name in names_of(1, 3)]
    assert all(second.is_whole(slot) for slot in slots)


def test_a_block_that_was_changed_behind_the_stores_back_is_a_miss(directory: Path) -> None:
    store, other = opened(directory), opened(directory)
    write(store, names_of(1, 2))
    slots = store.pin(names_of(1, 2))
    store.view(slots[1])[17] ^= 1
    assert [store.is_whole(slot) for slot in slots] == [True, False]
    store.unpin(slots)
    assert other.changes() is not None
    assert other.leading(names_of(1, 2)) == 1
    assert other.corrupt_total == 1


def test_a_store_never_has_more_than_it_was_given(directory: Path) -> None:
    store = opened(directory)
    for chain in range(60):
        write(store, names_of(chain, 8))
    assert store.evictions_total > 0
    used = sum(file.stat().st_blocks * 512 for file in directory.iterdir())
    assert used <= STORE_BYTES
    assert len(store) == store.slots == slots_of(STORE_BYTES, BLOCK_BYTES)


def test_a_store_that_is_too_small_for_a_block_says_so(directory: Path) -> None:
    with pytest.raises(HostTierUnavailable, match="no room for a block"):
        opened(directory, 100)


def test_a_store_that_is_there_keeps_its_size(directory: Path) -> None:
    first = opened(directory)
    assert opened(directory, 2 * STORE_BYTES).slots == first.slots


def test_a_directory_that_others_may_read_is_refused(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(HostTierUnavailable, match="only user"):
        opened(directory)


def test_files_are_for_their_owner_alone(directory: Path) -> None:
    opened(directory)
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_file_that_was_not_finished_is_made_anew(directory: Path) -> None:
    store = opened(directory)
    store.close()
    path = directory / "k.kv"
    content = bytearray(path.read_bytes())
    content[:8] = bytes(8)
    path.write_bytes(content)
    anew = opened(directory)
    assert write(anew, names_of(1, 2)) == 2


def test_stores_are_removed_once_nobody_has_them_open(directory: Path) -> None:
    store = opened(directory)
    assert remove_stores(directory) == 0
    store.close()
    assert remove_stores(directory, unused_s=1000) == 0
    os.utime(directory / "k.lock", (time.time() - 2000,) * 2)
    assert remove_stores(directory, unused_s=1000) == 1
    assert not directory.exists()


@pytest.mark.live
def test_whoever_stopped_with_the_lock_is_not_waited_for(directory: Path) -> None:
    memory = SharedMemory(directory, "k", BLOCK_BYTES, STORE_BYTES)
    store = opened(directory, lock_s=0.02)
    with memory.lock(), pytest.raises(HostTierUnavailable, match="locked"):
        store.pin(names_of(1, 1))


@pytest.mark.process
def test_processes_that_are_killed_leave_a_store_that_others_go_on_with(directory: Path) -> None:
    store = opened(directory)
    for pause_s in (0.0, 0.003, 0.01, 0.017):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        deadline_s = time.monotonic() + pause_s
        while time.monotonic() < deadline_s:
            write(store, names_of(100, 4))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        store.validate()
        for chain in range(101):
            slots = store.pin(names_of(chain, 8))
            for name, slot in zip(names_of(chain, 8), slots, strict=False):
                assert store.is_whole(slot)
                assert (store.view(slot) == byte_of(name)).all()
            store.unpin(slots)
    assert store.corrupt_total == 0
    for chain in range(60):
        write(store, names_of(chain, 8))
    assert store.leading(names_of(59, 8)) == 8
    assert len(store) == store.slots
