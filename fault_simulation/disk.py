"""A simulated disk: what was not synced when its process was killed is lost, or torn in the middle."""

import errno
import random
from pathlib import Path


class _Content:
    """A file's bytes, and how many of them are on the disk."""

    __slots__ = ("content", "synced_bytes")

    def __init__(self) -> None:
        self.content = bytearray()
        self.synced_bytes = 0


class SimulatedDisk:
    """A `mesh.store.disk.Disk`. It belongs to a machine, so it outlives the processes there."""

    def __init__(self, rng: random.Random) -> None:
        self.is_full = False
        """Writes fail, after a part of what was to be written."""
        self._rng = rng
        self._files: dict[Path, _Content] = {}
        self._lasting: dict[Path, _Content] = {}
        """The names that are on the disk."""
        self._locks: dict[Path, _Lock] = {}

    def crash(self) -> None:
        """The process was killed, as by a loss of power: names that were not synced may be gone, and of bytes that
        were not synced any number is."""
        if self._rng.random() < 0.5:
            self._files = dict(self._lasting)
        for file in self._files.values():
            kept_bytes = self._rng.randint(file.synced_bytes, max(file.synced_bytes, len(file.content)))
            del file.content[kept_bytes:]
            file.synced_bytes = min(file.synced_bytes, len(file.content))
        self._locks.clear()

    def release_locks(self) -> None:
        """The process that held them has ended."""
        self._locks.clear()

    def wipe(self) -> None:
        """Lose everything."""
        self._files.clear()
        self._lasting.clear()

    def make_folder(self, folder: Path) -> None:
        """Folders are not kept."""

    def read(self, path: Path) -> bytes | None:
        """What a file holds."""
        file = self._files.get(path)
        return None if file is None else bytes(file.content)

    def create(self, path: Path) -> "SimulatedFile":
        """A new empty file."""
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._files[path] = _Content()
        return SimulatedFile(self, self._files[path], self._rng)

    def replace(self, source: Path, target: Path) -> None:
        """At once; lasting from `sync_folder` on."""
        self._files[target] = self._files.pop(source)

    def sync_folder(self, folder: Path) -> None:
        """The names in it last from now on."""
        self._lasting = dict(self._files)

    def lock(self, path: Path) -> "_Lock":
        """Raises BlockingIOError if somebody else holds it."""
        if path in self._locks:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", str(path))
        lock = self._locks[path] = _Lock(self._locks, path)
        return lock


class SimulatedFile:
    """A `mesh.store.disk.AppendedFile`."""

    def __init__(self, disk: SimulatedDisk, file: _Content, rng: random.Random) -> None:
        self._disk = disk
        self._file = file
        self._rng = rng

    def write(self, content: bytes) -> None:
        """Append; on a full disk a part of it, and OSError."""
        if self._disk.is_full:
            self._file.content += content[: self._rng.randrange(len(content) + 1)]
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.content += content

    def sync(self) -> None:
        """All of it is on the disk."""
        if self._disk.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._file.synced_bytes = len(self._file.content)

    def truncate(self, size_bytes: int) -> None:
        """Cut off what lies behind."""
        del self._file.content[size_bytes:]
        self._file.synced_bytes = min(self._file.synced_bytes, size_bytes)

    def close(self) -> None:
        """Nothing to do."""


class _Lock:
    def __init__(self, locks: dict[Path, "_Lock"], path: Path) -> None:
        self._locks = locks
        self._path = path

    def release(self) -> None:
        if self._locks.get(self._path) is self:
            del self._locks[self._path]
