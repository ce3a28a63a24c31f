"""Writes what the scheduler was told and decided to a file, if it is asked to: see `controlplane.recording`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from controlplane.model.cluster import ClusterLimits, ClusterTable
from controlplane.recording import events
from controlplane.recording.table import RecordingTable
from mesh.errors import ConfigurationError

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 16
FORMER = ".former"


class Recorder:
    """One file, from the scheduler's start until it ends or the file is full. Each line is one event, as JSON.

    A file of that name from before is kept as `NAME.former`: a scheduler is started anew just when one wants to know
    what its former life decided.
    """

    def __init__(self, path: Path, max_bytes: int, limits: ClusterLimits) -> None:
        """Raises `ConfigurationError` if the file cannot be written."""
        try:
            if path.is_file() and path.stat().st_size:
                path.replace(path.with_name(path.name + FORMER))
            self._file: BinaryIO | None = path.open("wb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise ConfigurationError(f"cannot record to {path}: {error.strerror}; choose another file") from None
        self._path = path
        self._left_bytes = max_bytes
        self._limits = limits
        self._encoder = msgspec.json.Encoder()
        self._numbers = count()
        self.events_total = 0
        self.tell(events.Begun(limits))
        log.warning("recording every placement", extra={"path": str(path), "max_bytes": max_bytes})

    @property
    def is_recording(self) -> bool:
        """Whether there is room left."""
        return self._file is not None

    def new_table(self) -> ClusterTable:
        """A table that tells this recorder."""
        return RecordingTable(self._limits, next(self._numbers), self.tell)

    def tell(self, event: events.Event) -> None:
        """Write it down."""
        if self._file is None:
            return
        line = self._encoder.encode(event) + b"\n"
        if len(line) > self._left_bytes:
            log.error("the recording is full and ends here", extra={"path": str(self._path)})
            self.close()
            return
        self._left_bytes -= len(line)
        self.events_total += 1
        with self._ending_on_failure():
            self._file.write(line)

    def flush(self) -> None:
        """So that a scheduler that is killed leaves all but the last moments."""
        if self._file is not None:
            with self._ending_on_failure():
                self._file.flush()

    def close(self) -> None:
        """The end of the recording."""
        if self._file is not None:
            with self._ending_on_failure():
                self._file.close()
            self._file = None

    @contextmanager
    def _ending_on_failure(self) -> Iterator[None]:
        """A disk that is full ends the recording, not the scheduler."""
        file = self._file
        try:
            yield
        except OSError as error:
            log.error("the recording ends: the file cannot be written", extra={"error": str(error)})
            self._file = None
            if file is not None:
                with suppress(OSError):
                    file.close()
