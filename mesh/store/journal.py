"""A file in which the keys without a lease outlive the process: one JSON line per revision, synced before it counts."""

import fcntl
import os
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from mesh.errors import StoreError
from mesh.store.interface import KeyValue, WatchEvent

_REWRITE_ABOVE_BYTES: Final = 1 << 20


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one revision did. A rewritten journal has one line per key, each with that key's own revision."""

    revision: int
    puts: dict[str, bytes] = {}
    deletes: list[str] = []


class Journal:
    """Open it, take `entries` and `revision` from it, then give every write to `record`.

    A last line that was torn by a crash is dropped: its write was never answered. Any other damage, and a file that
    another process holds, raise `StoreError`. The file is rewritten when most of it is history.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: dict[str, KeyValue] = {}
        self.revision = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(path)
            lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
        except OSError as error:
            raise StoreError(f"cannot open the store file {path}: {error}") from error
        try:
            for number, line in enumerate(lines[:-1], start=1):
                self._replay(line, number)
            self._file = self._rewrite()
        except BaseException:
            os.close(self._lock)
            raise

    def record(self, events: list[WatchEvent]) -> None:
        """Make the events of one revision durable, leaving out what hangs on a lease. Raises `StoreError`."""
        puts = {event.key: event.value for event in events if event.kind == "put" and not event.incarnation_id}
        deletes = [event.key for event in events if event.key not in puts and event.key in self.entries]
        if not puts and not deletes:
            return
        line = _Line(events[0].mod_revision, puts, deletes)
        try:
            self._append(line)
            self._apply(line)
            if self._size_bytes > self._rewrite_above_bytes:
                self._file.close()
                self._file = self._rewrite()
        except OSError as error:
            raise StoreError(f"cannot write the store file {self._path}: {error}; free space, then restart") from error

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()
        os.close(self._lock)

    def _append(self, line: _Line) -> None:
        encoded = msgspec.json.encode(line) + b"\n"
        try:
            self._file.write(encoded)
            os.fsync(self._file.fileno())
        except OSError:
            # What got through would look like damage in the middle of the file once the next line follows.
            os.ftruncate(self._file.fileno(), self._size_bytes)
            raise
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
        for key, value in line.puts.items():
            self.entries[key] = KeyValue(key, value, line.revision)
        for key in line.deletes:
            self.entries.pop(key, None)

    def _rewrite(self) -> FileIO:
        """Replace the file by one that holds only what is there now."""
        lines = [_Line(entry.mod_revision, {entry.key: entry.value}) for entry in self.entries.values()]
        # The newest revision may have been a delete; it must not be given out again.
        lines.append(_Line(self.revision))
        draft = self._path.with_name(self._path.name + ".new")
        with draft.open("wb") as file:
            file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self._path)
        _sync_directory(self._path.parent)
        self._size_bytes = self._path.stat().st_size
        self._rewrite_above_bytes = max(_REWRITE_ABOVE_BYTES, 4 * self._size_bytes)
        return self._path.open("ab", buffering=0)


def _lock(path: Path) -> int:
    """Hold `path`.lock for this process; it is a file of its own because the journal is replaced when rewritten."""
    descriptor = os.open(path.with_name(path.name + ".lock"), os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(f"another process holds the store file {path}; stop it or choose another file") from error
    return descriptor


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
