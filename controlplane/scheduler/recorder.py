"""Writes what the scheduler was told and decided to a file, if it is asked to: see `controlplane.recording`."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import BinaryIO

import msgspec

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.placement import Placement, PlacementRequest
from controlplane.policies.interface import Policy
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.placement import Stages
from controlplane.recording import events
from controlplane.recording.table import RecordingTable
from controlplane.scheduler.policy_switch import PolicySwitch
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
        """Append an event to the file; where it is full or cannot be written, the recording ends, loudly."""
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


class DecisionRecorder:
    """Tells a `Recorder` of every decision and of what it was made by: call `before` it, and then what came of it.

    Without a recorder, and once its file is full, it does nothing.
    """

    def __init__(self, recorder: Recorder | None, switch: PolicySwitch, table: Callable[[], ClusterTable]) -> None:
        self._recorder = recorder
        self._switch = switch
        self._table = table
        self._configured: Policy | None = None
        self._fallback = ""
        self._layouts: dict[str, StageLayout] = {}
        """By which the configured policy is known to place."""

    def before(self, request: PlacementRequest) -> int:
        """A decision is about to be made; the digest of what it will see."""
        if not self._is_on:
            return 0
        self._tell_policy()
        return events.digest(self._table().snapshot(request.model))

    def placed(self, request: PlacementRequest, placement: Placement | None, seen: int) -> None:
        """A request was placed, or (`placement` None) refused; `seen` is what `before` returned."""
        if not self._is_on:
            return
        if placement is None:
            self._tell(events.Placed(self._number, request, snapshot_digest=seen))
            return
        self._tell(
            events.Placed(
                self._number,
                request,
                placement.instance.instance_id,
                placement.decode_instance.instance_id,
                placement.is_decode_open,
                placement.cached_tokens,
                seen,
                "" if placement.pull is None else placement.pull.source.instance_id,
                0 if placement.pull is None else placement.pull.tokens,
            )
        )

    def decode_placed(self, request: PlacementRequest, prefill_instance_id: str, chosen_id: str, seen: int) -> None:
        """Who decodes a request was decided at the end of its prefill."""
        if self._is_on:
            self._tell(events.DecodePlaced(self._number, request, prefill_instance_id, chosen_id, seen))

    def shown(self, now_s: float) -> None:
        """The policy in force is about to be shown the cluster."""
        if self._is_on:
            self._tell_policy()
            self._tell(events.Observed(self._number, now_s))

    def resumed(self, model: str, pools: Mapping[str, str]) -> None:
        """The configured policy goes on with these pools."""
        if self._is_on:
            self._tell_policy()
            self._tell(events.PoolsResumed(model, dict(pools)))

    @property
    def _is_on(self) -> bool:
        return self._recorder is not None and self._recorder.is_recording

    @property
    def _number(self) -> int:
        table = self._table()
        assert isinstance(table, RecordingTable), "a recorder makes the tables"
        return table.number

    def _tell(self, event: events.Event) -> None:
        assert self._recorder is not None
        self._recorder.tell(event)

    def _tell_policy(self) -> None:
        switch = self._switch
        if switch.configured is not self._configured:
            self._configured = switch.configured
            self._tell(events.PolicySet(switch.configured.name, switch.configured.parameters.values()))
            self._layouts = {}
        if isinstance(switch.configured, Stages) and switch.configured.layouts != self._layouts:
            self._tell_layouts(switch.configured.layouts)
        if switch.fallback_name != self._fallback:
            former, self._fallback = self._fallback, switch.fallback_name
            self._tell(events.FallbackSet(bool(self._fallback), self._fallback or former))

    def _tell_layouts(self, layouts: Mapping[str, StageLayout]) -> None:
        for model in sorted(layouts.keys() | self._layouts.keys()):
            if layouts.get(model) != self._layouts.get(model):
                self._tell(events.LayoutSet(model, layouts.get(model)))
        self._layouts = dict(layouts)
