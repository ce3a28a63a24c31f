"""The instances of one model, as columns that are written in place and copied into snapshots."""

import bisect
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.answer_lengths import AnswerLengths
from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState, LoadReport
from controlplane.model.kv_costs import NO_KV_COSTS, KvCostRow, KvCosts, kv_cost_column, kv_costs_of
from controlplane.model.prompt_prices import PriceRow, prompt_prices
from controlplane.model.snapshot import INSTANCE_STATES, Column, Integers, Snapshot
from controlplane.model.step_costs import DATASHEET_COSTS, CostRow, StepCosts
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
        # Single items are read and written twice as fast through a memoryview as through numpy, and again twice as fast
        # through one for each indicator.
        self._items = _items_of(self._table)
        self._prices: NDArray[np.float64] = np.zeros((PriceRow.COUNT, 0))
        self._price_items = _items_of(self._prices)
        self._row_costs: list[StepCosts] = []
        self._profiled: set[str] = set()
        """Instances whose costs are known."""
        self._running_requests = 0
        self._batch_total = 0
        self._held_tokens_total = 0
        self._placeable: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._prefill_rows: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._decode_rows: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._is_restricted = False
        self._costs: NDArray[np.float64] = np.zeros((CostRow.COUNT, 0))
        self._uniform_costs: tuple[float, ...] | None = None
        self._kv_costs: NDArray[np.float64] = np.zeros((KvCostRow.COUNT, 0))
        self._uniform_kv_costs: tuple[float, ...] | None = None
        self._brings_kv = False
        self._least_kv_tokens = 0
        self._answers = AnswerLengths()
        self._version = 0
        self._snapshot: Snapshot | None = None

    def snapshot(self) -> Snapshot:
        """An immutable copy of the columns as they are now; the same object until something changes."""
        if self._snapshot is None:
            table = self._table.copy()
            table.flags.writeable = False
            prices = self._prices.copy()
            prices.flags.writeable = False
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
                self._costs,
                self._uniform_costs,
                self._answers.mean_tokens(self._running_requests),
                self._kv_costs,
                self._uniform_kv_costs,
                self._brings_kv,
                self._least_kv_tokens,
                prices,
                self._batch_total,
                self._held_tokens_total,
                len(self._profiled) == len(self._ids),
            )
        return self._snapshot

    def add(self, instance: InstanceDescription, slot: int) -> None:
        """A new instance; it may be placed on once its first load report says that it is ready."""
        row = bisect.bisect(self._ids, instance.instance_id)
        column = np.zeros(Column.COUNT, np.int64)
        column[Column.KV_BLOCKS_TOTAL] = instance.kv_blocks
        column[Column.BLOCK_TOKENS] = instance.block_tokens
        column[Column.SLOT] = slot
        column[Column.STEP_TOKENS] = instance.max_step_tokens
        column[Column.STATE] = STATE_CODES[InstanceState.STARTING]
        self._table = np.insert(self._table, row, column, axis=1)
        self._prices = np.insert(self._prices, row, 0.0, axis=1)
        self._row_costs.insert(row, DATASHEET_COSTS)
        self._use_costs(np.insert(self._costs, row, msgspec.structs.astuple(DATASHEET_COSTS), axis=1))
        self._use_kv_costs(np.insert(self._kv_costs, row, kv_cost_column(NO_KV_COSTS), axis=1))
        self._ids.insert(row, instance.instance_id)
        self._instances = (*self._instances[:row], instance, *self._instances[row:])
        self.slots_mask |= 1 << slot
        self._reindex()
        self._set_prices(row)

    def remove(self, instance_id: str) -> None:
        """Drop an instance's row. Raises `KeyError` for an unknown one."""
        row = self._rows[instance_id]
        self.slots_mask ^= 1 << self.slot(instance_id)
        self._running_requests -= self._items[Column.RUNNING_REQUESTS][row]
        self._batch_total -= int(self._price_items[PriceRow.BATCH][row])
        self._held_tokens_total -= int(self._price_items[PriceRow.HELD_TOKENS][row])
        self._table = np.ascontiguousarray(np.delete(self._table, row, axis=1))
        self._prices = np.ascontiguousarray(np.delete(self._prices, row, axis=1))
        del self._row_costs[row]
        self._use_costs(np.delete(self._costs, row, axis=1))
        self._use_kv_costs(np.delete(self._kv_costs, row, axis=1))
        del self._ids[row]
        self._profiled.discard(instance_id)
        self._instances = (*self._instances[:row], *self._instances[row + 1 :])
        self._reindex()

    def row(self, instance_id: str) -> int | None:
        """The instance's place; None if it is not here."""
        return self._rows.get(instance_id)

    def slot(self, instance_id: str) -> int:
        """The bit of the prefix index's masks that stands for the instance."""
        return int(self._table[Column.SLOT, self._rows[instance_id]])

    def move_slot(self, instance_id: str, slot: int) -> None:
        """The instance stands at another slot of the prefix index from now on."""
        self.slots_mask &= ~(1 << self.slot(instance_id))
        self.slots_mask |= 1 << slot
        self._table[Column.SLOT, self._rows[instance_id]] = slot
        self._changed()

    def report(self, instance_id: str, load: LoadReport, state: InstanceState, before: LoadReport) -> None:
        """Write a load report and a state into the instance's row; `before` is the report before it."""
        self._answers.add(
            load.generated_tokens_total - before.generated_tokens_total,
            load.finished_requests_total - before.finished_requests_total,
        )
        items, row = self._items, self._rows[instance_id]
        self._running_requests += load.running_requests - items[Column.RUNNING_REQUESTS][row]
        items[Column.RUNNING_REQUESTS][row] = load.running_requests
        items[Column.QUEUED_REQUESTS][row] = load.queued_requests
        items[Column.QUEUED_PREFILL_TOKENS][row] = load.queued_prefill_tokens
        items[Column.RUNNING_TOKENS][row] = load.running_tokens
        items[Column.KV_BLOCKS_USED][row] = load.kv_blocks_used
        items[Column.DECODING_REQUESTS][row] = load.decoding_requests
        items[Column.TOKEN_INTERVAL_US][row] = round(1000 * load.token_interval_ms)
        self._add_up(row)
        if items[Column.STATE][row] == (code := STATE_CODES[state]):
            self._changed()
        else:
            items[Column.STATE][row] = code
            self._update_placeable(row)

    def set_costs(self, instance_id: str, costs: StepCosts) -> None:
        """What the instance's steps cost is known, or known better."""
        row = self._rows[instance_id]
        changed = self._costs.copy()
        changed[:, row] = msgspec.structs.astuple(costs)
        self._use_costs(changed)
        self._row_costs[row] = costs
        self._profiled.add(instance_id)
        self._set_prices(row)
        self._changed()

    def costs(self, instance_id: str) -> StepCosts:
        """What the instance's steps cost, as far as is known."""
        return self._row_costs[self._rows[instance_id]]

    def is_profiled(self, instance_id: str) -> bool:
        """Whether its costs were measured; if not, they are a data sheet's."""
        return instance_id in self._profiled

    def set_kv_costs(self, instance_id: str, costs: KvCosts) -> None:
        """What it takes to bring KV to the instance is known, or known better."""
        changed = self._kv_costs.copy()
        changed[:, self._rows[instance_id]] = kv_cost_column(costs)
        self._use_kv_costs(changed)
        self._changed()

    def kv_costs(self, instance_id: str) -> KvCosts:
        """What it takes to bring KV to the instance, as far as is known."""
        return kv_costs_of(self._kv_costs[:, self._rows[instance_id]])

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
        self._items[Column.UNREPORTED_REQUESTS][row] += requests
        self._items[Column.UNREPORTED_PREFILL_TOKENS][row] += prefill_tokens
        self._add_up(row)
        self._changed()

    def believed(self, instance_id: str) -> tuple[int, int]:
        """Requests, and prompt tokens to be computed, that the instance has with what it has not reported yet."""
        items, row = self._items, self._rows[instance_id]
        return items[Column.BATCH_REQUESTS][row], items[Column.PENDING_PREFILL_TOKENS][row]

    def admit(self, instance_id: str, prefill_tokens: int) -> None:
        """A request that was placed there counts no more as unreported; `report`, which must follow, counts it."""
        row = self._rows[instance_id]
        self._items[Column.UNREPORTED_REQUESTS][row] -= 1
        self._items[Column.UNREPORTED_PREFILL_TOKENS][row] -= prefill_tokens

    def take_out(self, instance_id: str, prefill_tokens: int) -> None:
        """A request that the last report counts has ended. Its context is taken for that of the mean request there, and
        up to `prefill_tokens` of those that wait for its own."""
        items, row = self._items, self._rows[instance_id]
        running, queued = items[Column.RUNNING_REQUESTS][row], items[Column.QUEUED_REQUESTS][row]
        if queued and (prefill_tokens or not running):
            queued -= 1
            items[Column.QUEUED_REQUESTS][row] = queued
        elif running:
            for column in (Column.RUNNING_TOKENS, Column.KV_BLOCKS_USED):
                items[column][row] -= items[column][row] // running
            items[Column.DECODING_REQUESTS][row] = max(0, items[Column.DECODING_REQUESTS][row] - 1)
            running -= 1
            items[Column.RUNNING_REQUESTS][row] = running
            self._running_requests -= 1
        else:
            return  # the report has come after its end, and does not name it
        waiting_tokens = items[Column.QUEUED_PREFILL_TOKENS][row]
        items[Column.QUEUED_PREFILL_TOKENS][row] = max(0, waiting_tokens - prefill_tokens) if running or queued else 0
        self._add_up(row)
        self._changed()

    def add_unreported_decodes(self, instance_id: str, requests: int, context_tokens: int) -> None:
        """Add to (or, negative, take from) what is to be decoded there and has not come yet."""
        row = self._rows[instance_id]
        self._items[Column.UNREPORTED_DECODES][row] += requests
        self._items[Column.UNREPORTED_DECODE_TOKENS][row] += context_tokens
        self._changed()

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`, with all fields in the message, where the state contradicts itself."""
        self._answers.validate()
        table = self._table
        assert self._ids == sorted(set(self._ids)), "rows are in the order of ids"
        assert self._ids == [each.instance_id for each in self._instances] == list(self._rows), "rows are instances"
        assert table.shape == (Column.COUNT, len(self._ids)), "a column for each instance"
        assert self._costs.shape == (CostRow.COUNT, len(self._ids)), "costs of each instance"
        assert np.isfinite(self._costs).all(), "steps take a time"
        assert (self._costs >= 0).all(), "no part of a step takes less than none"
        assert self._kv_costs.shape == (KvCostRow.COUNT, len(self._ids)), "KV costs of each instance"
        assert (self._kv_costs >= 0).all(), "nothing is brought in less than no time"
        assert self.slots_mask == sum(1 << slot for slot in table[Column.SLOT].tolist()), "a slot for each instance"
        batch = table[Column.RUNNING_REQUESTS] + table[Column.QUEUED_REQUESTS] + table[Column.UNREPORTED_REQUESTS]
        assert np.array_equal(table[Column.BATCH_REQUESTS], batch), "a batch is what runs, waits and comes"
        pending = table[Column.QUEUED_PREFILL_TOKENS] + table[Column.UNREPORTED_PREFILL_TOKENS]
        assert np.array_equal(table[Column.PENDING_PREFILL_TOKENS], pending), "prefills are those that wait and come"
        assert self._running_requests == table[Column.RUNNING_REQUESTS].sum(), "running requests are counted"
        assert self._batch_total == batch.sum(), "batches are added up"
        held = table[Column.RUNNING_TOKENS] + pending
        assert self._held_tokens_total == held.sum(), "what batches have in the KV memory is added up"
        assert self._costs.T.tolist() == [list(msgspec.structs.astuple(each)) for each in self._row_costs], (
            "by row, too"
        )
        prices = [self._prices_of(row) for row in range(len(self._ids))]
        assert self._profiled <= set(self._ids), "costs are those of instances"
        assert self._prices.T.tolist() == [list(each) for each in prices], "prices are those of the load"
        assert not (table < 0).any(), "nothing is counted that is not there"
        placeable = (table[Column.STATE] == READY_CODE) & (table[Column.STALE] == 0)
        assert np.array_equal(self._placeable, placeable), "placeable is who is ready and heard"
        assert self.placeable_instances == placeable.sum(), "placeable instances are counted"

    def _add_up(self, row: int) -> None:
        """What every decision would otherwise compute for every instance."""
        items = self._items
        items[Column.BATCH_REQUESTS][row] = (
            items[Column.RUNNING_REQUESTS][row]
            + items[Column.QUEUED_REQUESTS][row]
            + items[Column.UNREPORTED_REQUESTS][row]
        )
        items[Column.PENDING_PREFILL_TOKENS][row] = (
            items[Column.QUEUED_PREFILL_TOKENS][row] + items[Column.UNREPORTED_PREFILL_TOKENS][row]
        )
        self._set_prices(row)

    def _set_prices(self, row: int) -> None:
        prices = self._prices_of(row)
        items = self._price_items
        self._batch_total += int(prices[PriceRow.BATCH] - items[PriceRow.BATCH][row])
        self._held_tokens_total += int(prices[PriceRow.HELD_TOKENS] - items[PriceRow.HELD_TOKENS][row])
        for column, price in zip(items, prices, strict=True):
            column[row] = price

    def _prices_of(self, row: int) -> tuple[float, ...]:
        items = self._items
        return prompt_prices(
            self._row_costs[row],
            items[Column.STEP_TOKENS][row],
            items[Column.RUNNING_REQUESTS][row],
            items[Column.RUNNING_TOKENS][row],
            items[Column.BATCH_REQUESTS][row],
            items[Column.PENDING_PREFILL_TOKENS][row],
        )

    def _update_placeable(self, row: int) -> None:
        ready = self._table[Column.STATE, row] == READY_CODE
        if self._placeable[row] != (ready and not self._table[Column.STALE, row]):
            self._set_placeable()
        self._changed()

    def _use_costs(self, costs: NDArray[np.float64]) -> None:
        """A new array, because snapshots share the old one."""
        costs.flags.writeable = False
        self._costs = costs
        self._uniform_costs = _uniform(costs)

    def _use_kv_costs(self, costs: NDArray[np.float64]) -> None:
        """A new array, because snapshots share the old one."""
        costs.flags.writeable = False
        self._kv_costs = costs
        self._uniform_kv_costs = _uniform(costs)
        self._brings_kv = bool(np.isfinite(costs[[KvCostRow.PULL_TOKEN, KvCostRow.LOAD_TOKEN]]).any())

    def _set_placeable(self) -> None:
        """A new array, because snapshots share the old one."""
        table = self._table
        self._placeable = (table[Column.STATE] == READY_CODE) & (table[Column.STALE] == 0)
        self._placeable.flags.writeable = False
        self.placeable_instances = int(self._placeable.sum())

    def _reindex(self) -> None:
        self._items, self._price_items = _items_of(self._table), _items_of(self._prices)
        self._rows = {instance_id: row for row, instance_id in enumerate(self._ids)}
        self._prefill_rows = _rows_where(instance.phase.prefills for instance in self._instances)
        self._decode_rows = _rows_where(instance.phase.decodes for instance in self._instances)
        self._is_restricted = any(instance.phase is not InstancePhase.ANY for instance in self._instances)
        self._least_kv_tokens = min((each.kv_blocks * each.block_tokens for each in self._instances), default=0)
        self._set_placeable()
        self._changed()

    def _changed(self) -> None:
        self._version += 1
        self._snapshot = None


def _uniform(costs: NDArray[np.float64]) -> tuple[float, ...] | None:
    """The costs that all instances have; None where they differ, and without an instance."""
    is_uniform = costs.size > 0 and bool((costs == costs[:, :1]).all())
    return tuple(costs[:, 0].tolist()) if is_uniform else None


def _items_of(table: NDArray[Any]) -> "list[memoryview[Any]]":
    """The items of each row, to be read and written in place."""
    return [row.data for row in table]


def _rows_where(flags: Iterable[bool]) -> NDArray[np.bool_]:
    rows = np.fromiter(flags, np.bool_)
    rows.flags.writeable = False
    return rows
