"""The immutable view of one model's instances that a placement policy sees."""

from bisect import bisect_left
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import InstanceDescription, InstanceState
from controlplane.model.step_costs import StepCosts

INSTANCE_STATES: tuple[InstanceState, ...] = tuple(InstanceState)
"""Decodes `Column.STATE`."""

Integers: TypeAlias = NDArray[np.int64]


class Column:
    """Rows of `Snapshot.table`; each is one indicator over all instances.

    Plain ints, not an IntEnum: numpy takes twice as long to index by an enum member.
    """

    RUNNING_REQUESTS: Final = 0
    RUNNING_TOKENS: Final = 1
    BATCH_REQUESTS: Final = 2
    PENDING_PREFILL_TOKENS: Final = 3
    QUEUED_REQUESTS: Final = 4
    QUEUED_PREFILL_TOKENS: Final = 5
    KV_BLOCKS_USED: Final = 6
    KV_BLOCKS_TOTAL: Final = 7
    UNREPORTED_REQUESTS: Final = 8
    UNREPORTED_PREFILL_TOKENS: Final = 9
    BLOCK_TOKENS: Final = 10
    SLOT: Final = 11
    """Where the instance stands in the prefix index."""
    STATE: Final = 12
    STALE: Final = 13
    DECODING_REQUESTS: Final = 14
    TOKEN_INTERVAL_US: Final = 15
    UNREPORTED_DECODES: Final = 16
    UNREPORTED_DECODE_TOKENS: Final = 17
    STEP_TOKENS: Final = 18
    COUNT: Final = 19


class Indicator:
    """One row of `Snapshot.table` as an attribute of the snapshot."""

    def __init__(self, row: int) -> None:
        self._row = row

    def __get__(self, snapshot: "Snapshot", owner: object) -> Integers:
        indicator: Integers = snapshot.table[self._row]
        return indicator


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """One model's instances, in the order of their ids so that every reader breaks ties alike.

    Every indicator is a read-only int64 array of shape (instances,). Load is as last reported; the
    `unreported` columns are the scheduler's own corrections for requests that it has placed and that no
    report counts yet.
    """

    model: str
    version: int
    """Grows with every change of the table behind it."""
    instances: tuple[InstanceDescription, ...]
    table: Integers
    """Shape (Column.COUNT, instances), read-only."""
    placeable: NDArray[np.bool_]
    """True where new requests may go: ready and not stale. Read-only."""
    placeable_instances: int
    prefill_rows: NDArray[np.bool_]
    """True where the operator lets new requests go, whatever the state. Read-only."""
    decode_rows: NDArray[np.bool_]
    """True where the operator lets requests be decoded whose prompt was computed elsewhere. Read-only."""
    is_restricted: bool
    """Whether any instance is for one phase only."""
    costs: NDArray[np.float64]
    """What steps cost on each instance, as far as is known. Shape (CostRow.COUNT, instances), read-only."""
    uniform_costs: tuple[float, ...] | None
    """The same where they are the same on all instances, which makes a decision a fifth cheaper; None where not."""
    answer_tokens: float
    """What the model's answers usually have."""
    kv_costs: NDArray[np.float64]
    """What it takes to bring KV to each instance; infinite where it cannot be. Shape (KvCostRow.COUNT, instances),
    read-only."""
    uniform_kv_costs: tuple[float, ...] | None
    """The same where they are the same on all instances; None where not."""
    brings_kv: bool
    """Whether KV can be brought to any instance at all."""
    least_kv_tokens: int
    """The KV memory of the instance that has least, in tokens."""
    prices: NDArray[np.float64]
    """What a prompt costs on each instance as it is now. Shape (PriceRow.COUNT, instances), read-only."""
    batch_total: int
    """`batch_requests` of all instances."""
    held_tokens_total: int
    """What the requests of all instances have in the KV memory once their prompts are computed."""
    is_profiled: bool
    """Whether the costs of all instances were measured; if not, some are a data sheet's."""

    running_requests = Indicator(Column.RUNNING_REQUESTS)
    queued_requests = Indicator(Column.QUEUED_REQUESTS)
    """Waiting for their first step, as reported."""
    queued_prefill_tokens = Indicator(Column.QUEUED_PREFILL_TOKENS)
    """Prompt tokens still to be computed, as reported."""
    running_tokens = Indicator(Column.RUNNING_TOKENS)
    """Context tokens of running requests."""
    kv_blocks_used = Indicator(Column.KV_BLOCKS_USED)
    kv_blocks_total = Indicator(Column.KV_BLOCKS_TOTAL)
    unreported_requests = Indicator(Column.UNREPORTED_REQUESTS)
    """Placed, and not yet counted by a report."""
    unreported_prefill_tokens = Indicator(Column.UNREPORTED_PREFILL_TOKENS)
    """Uncached prompt tokens of the unreported requests."""
    batch_requests = Indicator(Column.BATCH_REQUESTS)
    """LMetric's BS(i): running + queued + unreported requests."""
    pending_prefill_tokens = Indicator(Column.PENDING_PREFILL_TOKENS)
    """Prompt tokens that the instance will compute before a request placed now: queued + unreported."""
    block_tokens = Indicator(Column.BLOCK_TOKENS)
    slots = Indicator(Column.SLOT)
    stale = Indicator(Column.STALE)
    """1 where the load signal is too old to be believed."""
    decoding_requests = Indicator(Column.DECODING_REQUESTS)
    """Running requests whose prompt is computed, as reported."""
    token_interval_us = Indicator(Column.TOKEN_INTERVAL_US)
    """Mean microseconds between two tokens of the decoding requests, as reported; 0 where nothing decodes."""
    unreported_decodes = Indicator(Column.UNREPORTED_DECODES)
    """Requests that are to be decoded here once their prompt is computed elsewhere, and have not come yet."""
    unreported_decode_tokens = Indicator(Column.UNREPORTED_DECODE_TOKENS)
    """Prompt tokens of those."""
    step_tokens = Indicator(Column.STEP_TOKENS)
    """Token budget of one engine step."""

    def __len__(self) -> int:
        return len(self.instances)

    def row(self, instance_id: str) -> int | None:
        """The instance's place, None if it is not here."""
        row = bisect_left(self.instances, instance_id, key=lambda instance: instance.instance_id)
        found = row < len(self.instances) and self.instances[row].instance_id == instance_id
        return row if found else None

    def state(self, row: int) -> InstanceState:
        return INSTANCE_STATES[int(self.table[Column.STATE, row])]

    def costs_of(self, row: int) -> StepCosts:
        """What a step of the instance in this row costs, as far as is known."""
        return StepCosts(*self.costs[:, row].tolist())

    def refusal(self, row: int) -> str:
        """Why nothing may be placed on this instance; empty where something may."""
        state = self.state(row)
        if state is not InstanceState.READY:
            return f"is {state}"
        if self.table[Column.STALE, row]:
            return "is stale: its load reports have stopped"
        return ""
