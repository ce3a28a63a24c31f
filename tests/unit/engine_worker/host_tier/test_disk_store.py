"""A store of KV blocks on disk: what it gives back is what was written, whatever has become of its file."""

import asyncio
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from engine_worker.host_tier.disk_store import DiskStore, open_disk_store
from engine_worker.host_tier.disk_tier import DiskTier
from engine_worker.host_tier.index import WRITING
from engine_worker.host_tier.settings import HostTierSettings, host_tier_settings, open_disk
from engine_worker.host_tier.shared_memory import SharedMemory, slots_of
from engine_worker.host_tier.store import HostStore
from mesh.errors import ConfigurationError, HostTierUnavailable
from mesh.runtime import SystemClock, SystemThreads
from tests.examples import examples
from tests.unit.engine_worker.host_tier.test_shared_memory import BLOCK_BYTES, byte_of, names_of, write

DISK_BYTES = 1 << 19
INDEX_BYTES = 8192
"""Of header and entries, more or less: where faults hurt most."""


def opened(directory: Path, nbytes: int = DISK_BYTES) -> DiskStore:
    return open_disk_store(directory, "k", BLOCK_BYTES, nbytes, lock_s=10.0)


def content_of(name: bytes) -> np.ndarray:
    return np.full(BLOCK_BYTES, byte_of(name), np.uint8)


def put(store: DiskStore, names: list[bytes]) -> int:
    return sum(store.write(names, index, content_of(name), index) for index, name in enumerate(names))


def read(store: DiskStore, names: list[bytes]) -> int:
    """How many come back; none of them is anything but what was written."""
    into = [np.zeros(BLOCK_BYTES, np.uint8) for _ in names]
    hashes = store.read(names, into)
    for name, block in zip(names[: len(hashes)], into, strict=False):
        assert (block == byte_of(name)).all()
    return len(hashes)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "disk"


def test_blocks_outlive_the_process_and_are_found_by_their_names(directory: Path) -> None:
    first = opened(directory)
    assert put(first, names_of(1, 5)) == 5
    assert not first.lacks(names_of(1, 5)[4])
    first.close()
    second = opened(directory)
    assert second.leading(names_of(1, 7)) == 5
    assert read(second, names_of(1, 7)) == 5
    told = second.changes()
    assert told is not None
    assert (set(told.stored), told.tier) == ({0, 1, 2, 3, 4}, "disk")
    second.validate()


def test_it_never_has_more_than_it_was_given_and_forgets_what_was_used_longest_ago(directory: Path) -> None:
    store = opened(directory)
    for chain in range(40):
        put(store, names_of(chain, 4))
        read(store, names_of(0, 4))
    assert store.evictions_total > 0
    assert sum(file.stat().st_blocks * 512 for file in directory.iterdir()) <= DISK_BYTES
    assert len(store) == store.slots == slots_of(DISK_BYTES, BLOCK_BYTES)
    assert [read(store, names_of(chain, 4)) for chain in (0, 1, 39)] == [4, 0, 4]


def test_two_processes_share_it(directory: Path) -> None:
    one, other = opened(directory), opened(directory)
    put(one, names_of(3, 3))
    assert other.changes() is not None
    assert read(other, names_of(3, 3)) == 3
    assert put(other, names_of(3, 3)) == 0, "they are there"


def test_a_block_that_was_cut_off_or_changed_is_a_miss_and_forgotten(directory: Path) -> None:
    store = opened(directory)
    put(store, names_of(1, 3))
    path = directory / "k.kv"
    content = bytearray(path.read_bytes())
    where = content.rindex(bytes([byte_of(names_of(1, 3)[1])]) * 64)
    with path.open("r+b") as file:
        file.seek(where)
        file.write(b"\xff")
    assert read(store, names_of(1, 3)) == 1
    assert store.corrupt_total == 1
    assert store.leading(names_of(1, 3)) == 1
    os.truncate(path, content.index(bytes([byte_of(names_of(1, 3)[0])]) * 64))
    assert read(store, names_of(1, 3)) == 0


FAULTS = st.lists(
    st.tuples(st.sampled_from(["truncate", "garbage", "zeros"]), st.floats(0, 1), st.integers(1, 4096), st.booleans()),
    min_size=1,
    max_size=4,
)


@settings(max_examples=examples(30), deadline=None)
@given(FAULTS, st.integers(0, 1 << 30))
def test_whatever_a_crash_has_left_no_other_block_comes_back(
    tmp_path_factory: pytest.TempPathFactory, faults: list[tuple[str, float, int, bool]], seed: int
) -> None:
    directory, rng = tmp_path_factory.mktemp("crashed") / "disk", random.Random(seed)
    store = opened(directory)
    for chain in range(4):
        put(store, names_of(chain, 5))
    store.close()
    path = directory / "k.kv"
    for kind, share, count, is_index in faults:
        size = path.stat().st_size
        at = int(share * (min(size, INDEX_BYTES) if is_index else size))
        if kind == "truncate":
            os.truncate(path, at)
            continue
        with path.open("r+b") as file:
            file.seek(at)
            file.write(rng.randbytes(count) if kind == "garbage" else bytes(count))
    try:
        store = opened(directory)
    except HostTierUnavailable:
        return  # the worker goes on without
    try:
        for chain in range(4):
            read(store, names_of(chain, 5))
        put(store, names_of(100, 5))
        assert read(store, names_of(100, 5)) == 5
        store.validate()
    finally:
        store.close()
        shutil.rmtree(directory.parent)


# -- behind a host's store


@pytest.fixture
def host(tmp_path: Path) -> Iterator[HostStore]:
    store = HostStore(SharedMemory(tmp_path / "host", "k", BLOCK_BYTES, 3 << 17, lock_s=10.0))
    yield store
    store.close()


async def spilled(tier: DiskTier, host: HostStore, chain: int, blocks: int = 4) -> None:
    """Blocks that an engine saves, and that are on the disk afterwards."""
    names = names_of(chain, blocks)
    write(host, names)
    for index in range(blocks):
        tier.saved(names, index, index)
    saving = asyncio.create_task(tier.save())
    async with asyncio.timeout(20):
        while tier.store.leading(names) < blocks:  # noqa: ASYNC110  the tier sets no event
            await asyncio.sleep(0.001)
    saving.cancel()


@pytest.mark.live
async def test_what_the_host_has_evicted_comes_back_from_the_disk(directory: Path, host: HostStore) -> None:
    tier = DiskTier(host, opened(directory, 1 << 20), SystemClock(), SystemThreads())
    for chain in range(host.slots // 4 + 2):
        await spilled(tier, host, chain)
    assert host.leading(names_of(0, 4)) < 4
    assert tier.leading(names_of(0, 6)) == 4
    lacked = 4 - host.leading(names_of(0, 4))
    loads = [tier.load(names_of(0, 4)) for _ in range(2)]
    assert sorted(await asyncio.gather(*loads)) == [0, lacked], "the second finds what the first has brought"
    slots = host.pin(names_of(0, 4))
    assert [int(host.view(slot)[7]) for slot in slots] == [byte_of(name) for name in names_of(0, 4)]
    assert all(map(host.is_whole, slots))
    assert tier.load_block_ms > 0


@pytest.mark.live
async def test_a_host_without_room_loads_nothing(directory: Path, host: HostStore) -> None:
    tier = DiskTier(host, opened(directory, 1 << 20), SystemClock(), SystemThreads())
    await spilled(tier, host, 1)
    for chain in range(2, 2 + host.slots // 4 + 1):
        write(host, names_of(chain, 4))
    for chain in range(2, 2 + host.slots // 4 + 1):
        host.pin(names_of(chain, 4))
    assert await tier.load(names_of(1, 4)) <= 4 - host.leading(names_of(1, 4)) + 4
    host.validate()


def test_options_say_what_is_wrong_with_them() -> None:
    assert host_tier_settings("1GiB", "", "2GiB:/var/tmp/x") == HostTierSettings(1 << 30, "", 2 << 30, "/var/tmp/x")
    assert host_tier_settings("", "", "") == HostTierSettings()
    for host_kv, disk_kv in (("", "1GiB"), ("1GiB", "much"), ("1GiB", "1GiB:var/tmp")):
        with pytest.raises(ConfigurationError):
            host_tier_settings(host_kv, "", disk_kv)


def test_a_disk_that_cannot_be_used_leaves_the_worker_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    settings = HostTierSettings(1 << 20, "", 1 << 20, str(tmp_path / "file"))
    assert open_disk("key", BLOCK_BYTES, settings) is None
    assert open_disk("key", BLOCK_BYTES, HostTierSettings(1 << 20)) is None


def test_what_is_read_and_written_is_let_go_though_the_lock_is_not_to_be_had_then(directory: Path) -> None:
    store, names = opened(directory), names_of(1, 3)
    assert put(store, names[:2]) == 2
    lock, write_block, read_block = store._memory.lock, store._memory.write, store._memory.read

    @contextmanager
    def refused() -> Iterator[None]:
        raise HostTierUnavailable("another process has it locked")
        yield

    def locked_meanwhile(copy: Callable[[int, np.ndarray], bool]) -> Callable[[int, np.ndarray], bool]:
        def copied(slot: int, content: np.ndarray) -> bool:
            store._memory.lock = refused  # type: ignore[method-assign]
            return copy(slot, content)

        return copied

    store._memory.write = locked_meanwhile(write_block)  # type: ignore[method-assign]
    store._memory.read = locked_meanwhile(read_block)  # type: ignore[method-assign]
    with pytest.raises(HostTierUnavailable):
        store.write(names, 2, content_of(names[2]), 2)
    store._memory.lock = lock  # type: ignore[method-assign]
    assert store.read(names[:1], [np.zeros(BLOCK_BYTES, np.uint8)]) == [0]
    store._memory.lock = lock  # type: ignore[method-assign]
    store.validate()
    assert not store._memory.entries["pins"].any()
    assert not (store._memory.entries["state"] == WRITING).any()
    store._memory.write = write_block  # type: ignore[method-assign]
    assert store.write(names, 2, content_of(names[2]), 2), "it is not taken for being written"
