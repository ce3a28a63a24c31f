"""The memory of a store that processes of one machine share: a file, of which each has a mapping.

In /dev/shm it is the machine's memory; in any other directory it is that of a file system, cached. Of a store called K:

    K.kv          a header, the entries, the journal, the blocks
    K.lock        whoever changes the entries has it locked (flock), which the kernel takes from the dead
    K.client-N    locked by the process that has the number N, for as long as it lives

Locks of the kernel rather than process ids: those are reused, and differ between containers. Blocks get memory when
they are first needed, by `posix_fallocate`: where /dev/shm is smaller than was thought (64 MiB in a plain container) a
store stays small, and no process is killed by SIGBUS.
"""

import fcntl
import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from engine_worker.host_tier.index import COUNTERS, ENTRY, JOURNAL_SLOTS, MAX_CLIENTS
from mesh.errors import HostTierUnavailable

log = logging.getLogger(__name__)

MAX_SLOTS: Final = 1 << 18
"""An entry is 80 bytes, and looking for room reads all of them."""
LOCK_S: Final = 0.2
"""Longer than changes take. Whoever holds the lock for longer was stopped, and the tier does without meanwhile."""
_OPENING_S = 10.0
UNUSED_S: Final = 3600.0
"""A store that nobody has open for so long is removed by the next worker that starts on the machine."""
_LOOK_S = 0.0002
_EXTENT_BYTES = 64 << 20
_MAGIC = b"PNSTKKV1"
_HEADER = struct.Struct("<8sQQ16s")
"""Magic, slots, bytes of a block, the store's id. The magic is written last."""
_COUNTERS_AT = 256
_ENTRIES_AT = 4096


class SharedMemory:
    """Implements `StoreMemory`. Threads of one process have to share one."""

    def __init__(
        self, directory: Path, key: str, block_bytes: int, store_bytes: int, *, lock_s: float = LOCK_S
    ) -> None:
        """Opens the store of this key, or makes it, so that it never has more than `store_bytes`. One that is there
        keeps its size. `lock_s`: how long its lock is waited for. Raises `HostTierUnavailable`."""
        self._lock_s = _OPENING_S
        try:
            _own_directory(directory)
            self._path = directory / f"{key}.kv"
            self._thread_lock = threading.Lock()
            self._lock = _open(directory / f"{key}.lock")
            self._clients: dict[int, int] = {}
            """Number of this process, and the file that it has locked."""
            self._is_full = False
            with self.lock():
                self._file = _open(self._path)
                slots = self._header(block_bytes)
                if not slots:
                    slots = slots_of(store_bytes, block_bytes)
                    self._create(slots, block_bytes)
                self._map(slots, block_bytes)
            self._lock_s = lock_s
        except OSError as error:
            raise HostTierUnavailable(f"the store of KV blocks in {directory} cannot be opened: {error}") from error
        if slots != (asked := slots_of(store_bytes, block_bytes)):
            log.warning("a host's store of KV blocks keeps its size", extra={"blocks": slots, "asked_blocks": asked})

    def block(self, slot: int) -> NDArray[np.uint8]:
        start = self._blocks_at + slot * self._stride
        return self._bytes[start : start + self._block_bytes]

    @contextmanager
    def lock(self) -> Iterator[None]:
        deadline_s = time.monotonic() + self._lock_s
        if not self._thread_lock.acquire(timeout=self._lock_s):
            raise HostTierUnavailable("another thread is busy with the host's store of KV blocks")
        try:
            while not _locked(self._lock):
                if time.monotonic() > deadline_s:
                    raise HostTierUnavailable(f"another process has had {self._path} locked for {self._lock_s:g} s")
                time.sleep(_LOOK_S)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def is_alive(self, client: int) -> bool:
        if client in self._clients:
            return True
        try:
            file = _open(self._client_path(client))
        except OSError:
            return True  # better a slot too few than one that two write to
        try:
            return not _locked(file)
        finally:
            os.close(file)

    def claim(self) -> int:
        for client in range(MAX_CLIENTS):
            if client in self._clients:
                continue
            file = _open(self._client_path(client))
            if _locked(file):
                self._clients[client] = file
                return client
            os.close(file)
        raise HostTierUnavailable(f"{MAX_CLIENTS} processes use {self._path} already, as many as may")

    def back(self, backed: int, wanted: int) -> int:
        extent = max(wanted - backed, _EXTENT_BYTES // self._stride)
        goal = min(self._slots, backed + extent)
        if self._is_full:
            return backed
        try:
            os.posix_fallocate(self._file, self._blocks_at + backed * self._stride, (goal - backed) * self._stride)
        except OSError as error:
            self._is_full = True
            log.error(
                "a host's store of KV blocks stays smaller than it was to be",
                extra={"has_bytes": backed * self._stride, "error": str(error), "file": str(self._path)},
            )
            return backed
        return goal

    def keep(self) -> None:
        with suppress(OSError):
            os.utime(self._lock)

    def close(self) -> None:
        self.keep()
        for file in (*self._clients.values(), self._lock, self._file):
            os.close(file)
        self._clients.clear()

    def _client_path(self, client: int) -> Path:
        return self._path.with_suffix(f".client-{client}")

    def _header(self, block_bytes: int) -> int:
        """Slots of the store that is there; 0: there is none, or its maker was killed before it was done."""
        header = os.pread(self._file, _HEADER.size, 0)
        if len(header) < _HEADER.size:
            return 0
        magic, slots, has_block_bytes, store_id = _HEADER.unpack(header)
        if magic != _MAGIC or has_block_bytes != block_bytes or not 0 < slots <= MAX_SLOTS:
            return 0
        self.store_id = store_id.decode()
        return int(slots)

    def _create(self, slots: int, block_bytes: int) -> None:
        os.ftruncate(self._file, 0)
        _, blocks_at, stride = _places(slots, block_bytes)
        os.ftruncate(self._file, blocks_at + slots * stride)
        os.posix_fallocate(self._file, 0, blocks_at)
        status = os.fstat(self._file)
        self.store_id = xxh3_64_hexdigest(f"{status.st_dev}/{status.st_ino}/{status.st_ctime_ns}/{self._path}".encode())
        header = _HEADER.pack(b"", slots, block_bytes, self.store_id.encode())
        os.pwrite(self._file, header[len(_MAGIC) :], len(_MAGIC))
        os.pwrite(self._file, _MAGIC, 0)

    def _map(self, slots: int, block_bytes: int) -> None:
        journal_at, self._blocks_at, self._stride = _places(slots, block_bytes)
        self._slots, self._block_bytes = slots, block_bytes
        mapping = mmap.mmap(self._file, self._mapped_bytes(slots))
        self._bytes: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.counters: NDArray[np.uint64] = np.frombuffer(mapping, np.uint64, COUNTERS, _COUNTERS_AT)
        self.entries: NDArray[Any] = np.frombuffer(mapping, ENTRY, slots, _ENTRIES_AT)
        self.journal: NDArray[np.uint32] = np.frombuffer(mapping, np.uint32, JOURNAL_SLOTS, journal_at)

    def _mapped_bytes(self, slots: int) -> int:
        return self._blocks_at + slots * self._stride

    @property
    def _is_alone(self) -> bool:
        """Nobody else has the store open. With the lock held, before `claim`."""
        return not any(map(_is_used, self._path.parent.glob(f"{self._path.stem}.client-*")))


def slots_of(store_bytes: int, block_bytes: int) -> int:
    """How many blocks a store of at most so many bytes has room for. Raises `HostTierUnavailable` if it is none."""
    overhead = _places(0, block_bytes)[1] + mmap.PAGESIZE
    slots = min(MAX_SLOTS, (store_bytes - overhead) // (_stride_of(block_bytes) + ENTRY.itemsize))
    if slots < 1:
        raise HostTierUnavailable(
            f"a store of {store_bytes} bytes has no room for a block of {block_bytes}: give it at least "
            f"{overhead + _stride_of(block_bytes) + ENTRY.itemsize} bytes"
        )
    return slots


def remove_stores(directory: Path, unused_s: float = 0.0) -> int:
    """Remove the stores that no living process has open and that were not used for so long. Returns how many. Raises
    nothing: what cannot be removed stays."""
    removed = 0
    for path in sorted(directory.glob("*.kv")):
        with suppress(OSError):
            lock = _open(path.with_suffix(".lock"))
            try:
                is_old = time.time() - os.fstat(lock).st_mtime >= unused_s
                if is_old and _locked(lock) and not any(map(_is_used, directory.glob(f"{path.stem}.client-*"))):
                    for file in (*directory.glob(f"{path.stem}.client-*"), path, path.with_suffix(".lock")):
                        file.unlink(missing_ok=True)
                    removed += 1
            finally:
                os.close(lock)
    with suppress(OSError):
        directory.rmdir()
    return removed


def _is_used(client: Path) -> bool:
    file = _open(client)
    try:
        return not _locked(file)
    finally:
        os.close(file)


def _stride_of(block_bytes: int) -> int:
    return -(-block_bytes // 64) * 64


def _places(slots: int, block_bytes: int) -> tuple[int, int, int]:
    """Where the journal and the blocks begin, and how far blocks are apart."""
    journal_at = _ENTRIES_AT + -(-slots * ENTRY.itemsize // 64) * 64
    blocks_at = -(-(journal_at + 4 * JOURNAL_SLOTS) // mmap.PAGESIZE) * mmap.PAGESIZE
    return journal_at, blocks_at, _stride_of(block_bytes)


def _own_directory(directory: Path) -> None:
    """KV tells what was asked and answered, so nobody else's processes may read it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or directory.is_symlink():
        raise HostTierUnavailable(
            f"{directory} is not a directory that only user {os.getuid()} may use; remove it, or give another one"
        )


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _locked(file: int) -> bool:
    """Whether the lock could be taken."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
