"""A file in which the keys without a lease outlive the process: one JSON line per revision, synced before it counts."""

import logging
from pathlib import Path
from typing import Final

import msgspec

from mesh.errors import StoreError
from mesh.store.disk import AppendedFile, Disk, DiskLock
from mesh.store.interface import KeyValue, WatchEvent

_REWRITE_ABOVE_BYTES: Final = 1 << 20
_RESERVED_REVISIONS: Final = 10_000
_log = logging.getLogger(__name__)


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one revision did. A rewritten journal has one line per key, each with that key's own revision."""

    revision: int
    reserved: int = 0
    """Revisions up to here may have been given out."""
    puts: dict[str, bytes] = {}
    deletes: list[str] = []


class Journal:
    """Open it, take `entries` and `revision` from it, `reserve` the first revision, then give every write to `record`.

    Revisions of keys with a lease are not in the file, and must not be given out again: watchers that saw them would
    take other events for those that come next. So they are reserved in the file, many at once, before they are used.

    A last line that was torn by a crash is dropped: its write was never answered. Any other damage, and a file that
    another process holds, raise `StoreError`. The file is rewritten when most of it is history.
    """

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self.entries: dict[str, KeyValue] = {}
        self.revision = 0
        """The newest one in the file."""
        self.reserved_revision = 0
        """No higher one has been given out."""
        try:
            disk.make_folder(path.parent)
            self._lock = _lock(disk, path)
            lines = (disk.read(path) or b"").split(b"\n")
        except OSError as error:
            raise StoreError(f"cannot open the store file {path}: {error}") from error
        self._torn = False
        self._file: AppendedFile | None = None
        try:
            for number, line in enumerate(lines[:-1], start=1):
                self._replay(line, number)
            self._rewrite()
        except OSError as error:
            self.close()
            raise StoreError(f"cannot write the store file {path}: {error}") from error
        except StoreError:
            self.close()
            raise

    def reserve(self, revision: int) -> None:
        """Let this revision and those that follow be given out. Raises `StoreError`."""
        if revision + _RESERVED_REVISIONS // 2 <= self.reserved_revision:
            return
        line = _Line(self.revision, reserved=revision + _RESERVED_REVISIONS)
        try:
            self._append(line)
        except OSError as error:
            if revision > self.reserved_revision:  # otherwise some are left, and by then the disk may have room again
                raise self._not_written(error) from error
        else:
            self._apply(line)

    def record(self, events: list[WatchEvent]) -> None:
        """Make the events of one revision durable, leaving out what hangs on a lease. Raises `StoreError`."""
        self.reserve(events[0].mod_revision)
        puts = {event.key: event.value for event in events if event.kind == "put" and not event.incarnation_id}
        deletes = [event.key for event in events if event.key not in puts and event.key in self.entries]
        if not puts and not deletes:
            return
        line = _Line(events[0].mod_revision, puts=puts, deletes=deletes)
        try:
            self._append(line)
        except OSError as error:
            raise self._not_written(error) from error
        self._apply(line)
        if self._size_bytes > self._rewrite_above_bytes:
            self._shrink()

    def _not_written(self, error: OSError) -> StoreError:
        return StoreError(f"cannot write the store file {self._path}: {error}; nothing was changed")

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def _append(self, line: _Line) -> None:
        assert self._file is not None
        if self._torn:
            # What an earlier failure left would look like damage in the middle of the file once a line follows.
            self._file.truncate(self._size_bytes)
        self._torn = True
        encoded = msgspec.json.encode(line) + b"\n"
        self._file.write(encoded)
        self._file.sync()
        self._torn = False
        self._size_bytes += len(encoded)

    def _replay(self, encoded: bytes, number: int) -> None:
        try:
            line = msgspec.json.decode(encoded, type=_Line)
        except msgspec.DecodeError as error:
            raise StoreError(
                f"line {number} of the store file {self._path} is damaged ({error}); restore a backup or remove it"
            ) from error
        self._apply(line)

    def _apply(self, line: _Line) -> None:
        self.revision = max(self.revision, line.revision)
        self.reserved_revision = max(self.reserved_revision, line.reserved, self.revision)
        for key, value in line.puts.items():
            self.entries[key] = KeyValue(key, value, line.revision)
        for key in line.deletes:
            self.entries.pop(key, None)

    def _shrink(self) -> None:
        try:
            self._rewrite()
        except OSError as error:
            _log.error("the store file %s could not be rewritten and goes on growing: %s", self._path, error)
            self._rewrite_above_bytes = 2 * self._size_bytes

    def _rewrite(self) -> None:
        """Replace the file by one that holds only what is there now."""
        lines = [_Line(entry.mod_revision, puts={entry.key: entry.value}) for entry in self.entries.values()]
        # What was given out, or may have been, must not be given out again.
        lines.append(_Line(self.revision, reserved=self.reserved_revision))
        encoded = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        draft = self._path.with_name(self._path.name + ".new")
        file = self._disk.create(draft)
        try:
            file.write(encoded)
            file.sync()
            self._disk.replace(draft, self._path)
        except OSError:
            file.close()
            raise
        if self._file is not None:
            self._file.close()
        self._file, self._torn, self._size_bytes = file, False, len(encoded)
        self._rewrite_above_bytes = max(_REWRITE_ABOVE_BYTES, 4 * self._size_bytes)
        self._disk.sync_folder(self._path.parent)


def _lock(disk: Disk, path: Path) -> DiskLock:
    """On a file of its own because the journal is replaced when rewritten."""
    try:
        return disk.lock(path.with_name(path.name + ".lock"))
    except BlockingIOError as error:
        raise StoreError(f"another process holds the store file {path}; stop it or choose another file") from error
