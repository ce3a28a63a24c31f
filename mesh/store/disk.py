"""What a store file needs of a disk, so that a simulation can tear, lose and refuse writes."""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Protocol


class AppendedFile(Protocol):
    """A file that is open at its end. What was written survives a crash of the machine once `sync` has returned."""

    def write(self, content: bytes) -> None:
        """Append. Raises OSError, also where a part was written."""

    def sync(self) -> None:
        """Return once all that was written is on the disk. Raises OSError."""

    def truncate(self, size_bytes: int) -> None:
        """Cut off what lies behind. Raises OSError."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class DiskLock(Protocol):
    """Held until it is released or the process ends."""

    def release(self) -> None:
        """Let another process take the lock."""


class Disk(Protocol):
    """The files of one machine. Every method raises OSError."""

    def make_folder(self, folder: Path) -> None:
        """Make a folder and its parents, unless it is there."""

    def read(self, path: Path) -> bytes | None:
        """The content of a file; None if there is none."""

    def create(self, path: Path) -> AppendedFile:
        """A new empty file, in place of one that is there."""

    def replace(self, source: Path, target: Path) -> None:
        """Give `source` the name `target`, whole or not at all. It survives a crash once `sync_folder` has returned."""

    def sync_folder(self, folder: Path) -> None:
        """Return once the names in it are on the disk."""

    def lock(self, path: Path) -> DiskLock:
        """Take the lock of this name. Raises BlockingIOError if somebody else holds it."""


class SystemDisk:
    """The `Disk` of this machine."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, path: Path) -> bytes | None:
        with suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def create(self, path: Path) -> AppendedFile:
        path.unlink(missing_ok=True)
        return _SystemFile(path)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, folder: Path) -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: Path) -> DiskLock:
        """Lock by flock(2) on a file that stays behind, because removing it would let two processes lock two files of
        one name."""
        return _SystemLock(path)


class _SystemFile:
    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, content: bytes) -> None:
        if self._file.write(content) != len(content):
            raise OSError(errno.ENOSPC, "only a part could be written")

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def truncate(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)

    def close(self) -> None:
        self._file.close()


class _SystemLock:
    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        os.close(self._descriptor)
