"""The instances of one model, as columns that are written in place and copied into snapshots."""

import bisect
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState, LoadReport
from controlplane.model.snapshot import INSTANCE_STATES, Column, Integers, Snapshot
from mesh.invariants import invariants

STATE_CODES = {state: code for code, state in enumerate(INSTANCE_STATES)}
READY_CODE = STATE_CODES[InstanceState.READY]


class Fleet:
    """The instances of one model as columns of integers, which policies compute on with NumPy.

    Rows are instances in the order of their ids. Columns are written in place; `snapshot` copies them only if something
    has changed since.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.slots_mask = 0
        """The instances' slots in the prefix index, as a bit mask."""
        self.placeable_instances = 0
        self._ids: list[str] = []
        self._instances: tuple[InstanceDescription, ...] = ()
        self._rows: dict[str, int] = {}
        self._table: Integers = np.zeros((Column.COUNT, 0), np.int64)
        self._placeable: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._prefill_rows: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._decode_rows: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._is_restricted = False
        self._version = 0
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """An immutable copy of the columns as they are now; the same object until something changes."""
        if self._snapshot is None:
            table = self._table.copy()
            table.flags.writeable = False
            self._snapshot = Snapshot(
                self.model,
                self._version,
                self._instances,
                table,
                self._placeable,
                self.placeable_instances,
                self._prefill_rows,
                self._decode_rows,
                self._is_restricted,
            )
        return self._snapshot

    def add(self, instance: InstanceDescription, slot: int) -> None:
        """A new instance; it may be placed on once its first load report says that it is ready."""
        row = bisect.bisect(self._ids, instance.instance_id)
        column = np.zeros(Column.COUNT, np.int64)
        column[Column.KV_BLOCKS_TOTAL] = instance.kv_blocks
        column[Column.BLOCK_TOKENS] = instance.block_tokens
        column[Column.SLOT] = slot
        column[Column.STATE] = STATE_CODES[InstanceState.STARTING]
        self._table = np.insert(self._table, row, column, axis=1)
        self._ids.insert(row, instance.instance_id)
        self._instances = (*self._instances[:row], instance, *self._instances[row:])
        self.slots_mask |= 1 << slot
        self._reindex()

    def remove(self, instance_id: str) -> None:
        """Drop an instance's row. Raises `KeyError` for an unknown one."""
        row = self._rows[instance_id]
        self.slots_mask ^= 1 << self.slot(instance_id)
        self._table = np.ascontiguousarray(np.delete(self._table, row, axis=1))
        del self._ids[row]
        self._instances = (*self._instances[:row], *self._instances[row + 1 :])
        self._reindex()

    def slot(self, instance_id: str) -> int:
        """The bit of the prefix index's masks that stands for the instance."""
        return int(self._table[Column.SLOT, self._rows[instance_id]])

    def move_slot(self, instance_id: str, slot: int) -> None:
        """The instance stands at another slot of the prefix index from now on."""
        self.slots_mask &= ~(1 << self.slot(instance_id))
        self.slots_mask |= 1 << slot
        self._table[Column.SLOT, self._rows[instance_id]] = slot
        self._changed()

    def report(self, instance_id: str, load: LoadReport, state: InstanceState) -> None:
        """Write a load report and a state into the instance's row."""
        table, row = self._table, self._rows[instance_id]
        table[Column.RUNNING_REQUESTS, row] = load.running_requests
        table[Column.QUEUED_REQUESTS, row] = load.queued_requests
        table[Column.QUEUED_PREFILL_TOKENS, row] = load.queued_prefill_tokens
        table[Column.RUNNING_TOKENS, row] = load.running_tokens
        table[Column.KV_BLOCKS_USED, row] = load.kv_blocks_used
        table[Column.DECODING_REQUESTS, row] = load.decoding_requests
        table[Column.TOKEN_INTERVAL_US, row] = round(1000 * load.token_interval_ms)
        table[Column.STATE, row] = STATE_CODES[state]
        self._add_up(row)
        self._update_placeable(row)

    def mark_stale(self, instance_id: str, stale: bool) -> None:
        """The instance's load signal is, or is no longer, too old to be believed."""
        row = self._rows[instance_id]
        self._table[Column.STALE, row] = stale
        self._update_placeable(row)

    def state(self, instance_id: str) -> InstanceState:
        """The instance's state by its last load report; starting before the first."""
        return INSTANCE_STATES[int(self._table[Column.STATE, self._rows[instance_id]])]

    def is_stale(self, instance_id: str) -> bool:
        """Whether the load signal was marked as too old to be placed by."""
        return bool(self._table[Column.STALE, self._rows[instance_id]])

    def add_unreported(self, instance_id: str, requests: int, prefill_tokens: int) -> None:
        """Add to (or, negative, take from) what is placed there and not reported yet."""
        row = self._rows[instance_id]
        self._table[Column.UNREPORTED_REQUESTS, row] += requests
        self._table[Column.UNREPORTED_PREFILL_TOKENS, row] += prefill_tokens
        self._add_up(row)
        self._changed()

    def add_unreported_decodes(self, instance_id: str, requests: int, context_tokens: int) -> None:
        """Add to (or, negative, take from) what is to be decoded there and has not come yet."""
        row = self._rows[instance_id]
        self._table[Column.UNREPORTED_DECODES, row] += requests
        self._table[Column.UNREPORTED_DECODE_TOKENS, row] += context_tokens
        self._changed()

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        table = self._table
        assert self._ids == sorted(set(self._ids)), "rows are in the order of ids"
        assert self._ids == [each.instance_id for each in self._instances] == list(self._rows), "rows are instances"
        assert table.shape == (Column.COUNT, len(self._ids)), "a column for each instance"
        assert self.slots_mask == sum(1 << slot for slot in table[Column.SLOT].tolist()), "a slot for each instance"
        batch = table[Column.RUNNING_REQUESTS] + table[Column.QUEUED_REQUESTS] + table[Column.UNREPORTED_REQUESTS]
        assert np.array_equal(table[Column.BATCH_REQUESTS], batch), "a batch is what runs, waits and comes"
        pending = table[Column.QUEUED_PREFILL_TOKENS] + table[Column.UNREPORTED_PREFILL_TOKENS]
        assert np.array_equal(table[Column.PENDING_PREFILL_TOKENS], pending), "prefills are those that wait and come"
        assert not (table < 0).any(), "nothing is counted that is not there"
        placeable = (table[Column.STATE] == READY_CODE) & (table[Column.STALE] == 0)
        assert np.array_equal(self._placeable, placeable), "placeable is who is ready and heard"
        assert self.placeable_instances == placeable.sum(), "placeable instances are counted"

    def _add_up(self, row: int) -> None:
        """Sums that every decision would otherwise compute for every instance."""
        table = self._table
        table[Column.BATCH_REQUESTS, row] = (
            table[Column.RUNNING_REQUESTS, row]
            + table[Column.QUEUED_REQUESTS, row]
            + table[Column.UNREPORTED_REQUESTS, row]
        )
        table[Column.PENDING_PREFILL_TOKENS, row] = (
            table[Column.QUEUED_PREFILL_TOKENS, row] + table[Column.UNREPORTED_PREFILL_TOKENS, row]
        )

    def _update_placeable(self, row: int) -> None:
        ready = self._table[Column.STATE, row] == READY_CODE
        if self._placeable[row] != (ready and not self._table[Column.STALE, row]):
            self._set_placeable()
        self._changed()

    def _set_placeable(self) -> None:
        """A new array, because snapshots share the old one."""
        table = self._table
        self._placeable = (table[Column.STATE] == READY_CODE) & (table[Column.STALE] == 0)
        self._placeable.flags.writeable = False
        self.placeable_instances = int(self._placeable.sum())

    def _reindex(self) -> None:
        self._rows = {instance_id: row for row, instance_id in enumerate(self._ids)}
        self._prefill_rows = _rows_where(instance.phase.prefills for instance in self._instances)
        self._decode_rows = _rows_where(instance.phase.decodes for instance in self._instances)
        self._is_restricted = any(instance.phase is not InstancePhase.ANY for instance in self._instances)
        self._set_placeable()
        self._changed()

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None


def _rows_where(flags: Iterable[bool]) -> NDArray[np.bool_]:
    rows = np.fromiter(flags, np.bool_)
    rows.flags.writeable = False
    return rows
