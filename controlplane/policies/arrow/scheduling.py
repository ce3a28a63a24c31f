"""SLO-aware scheduling of the two halves of a request (Arrow, section 5.3: Algorithms 1 and 2)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.arrow.instances import ElasticInstances
from controlplane.policies.arrow.parameters import ArrowParameters
from controlplane.policies.arrow.pools import Pool
from controlplane.policies.selection import among_candidates, lowest


@dataclass(frozen=True, slots=True, eq=False)
class PrefillAsked:
    """A request that is to be prefilled. Arrays of shape (instances,)."""

    prefill_ms: NDArray[np.float64]
    """Its predicted prefill time on each instance, where it may have cached prompt tokens."""
    cached_tokens: NDArray[np.int64]
    candidates: NDArray[np.bool_]
    """Where it may go; at least one."""
    turn: int
    """Breaks the ties that load and cache leave open."""


def schedule_prefill(instances: ElasticInstances, asked: PrefillAsked, parameters: ArrowParameters) -> int:
    """Algorithm 1: the row of the instance that prefills the request. May move an instance between pools."""
    first = _least_delayed(instances, asked, Pool.PREFILL)
    second = _least_delayed(instances, asked, Pool.DECODE_TO_PREFILL)
    for row in (first, second):
        if row is not None and instances.loads.prefill_delay_ms[row] + asked.prefill_ms[row] <= parameters.ttft_ms:
            return row
    if instances.decode_load_is_low():
        moved = instances.try_move_decode_to_prefill()
        if moved is not None and asked.candidates[moved]:
            return moved
    if first is not None:
        return first
    if second is not None:
        return second
    return _least(instances.loads.prefill_delay_ms, asked.candidates, asked)


def schedule_decode(
    instances: ElasticInstances,
    prefill_row: int | None,
    candidates: NDArray[np.bool_],
    turn: int,
    parameters: ArrowParameters,
) -> int | None:
    """Algorithm 2: the row of the instance that decodes the request; None where there is no candidate.

    `prefill_row`: where its prompt is computed, if it still is there. May move an instance between pools.
    """
    if prefill_row is not None and instances.pool(prefill_row).decodes:
        return prefill_row
    running = instances.loads.running_tokens
    first = _fewest_tokens(instances, candidates, Pool.DECODE, turn)
    second = _fewest_tokens(instances, candidates, Pool.PREFILL_TO_DECODE, turn)
    for row in (first, second):
        if row is not None and _can_take_more(instances, row, parameters):
            return row
    moved = instances.try_move_prefill_to_decode()
    if moved is not None and candidates[moved]:
        return moved
    if first is not None and (second is None or running[first] <= running[second]):
        return first
    if second is not None:
        return second
    return lowest(among_candidates(running, candidates), turn) if candidates.any() else None


def _can_take_more(instances: ElasticInstances, row: int, parameters: ArrowParameters) -> bool:
    loads = instances.loads
    has_room = loads.running_tokens[row] <= loads.max_running_tokens[row]
    return bool(has_room and loads.token_interval_ms[row] <= parameters.tpot_ms)


def _least_delayed(instances: ElasticInstances, asked: PrefillAsked, pool: Pool) -> int | None:
    rows = instances.rows_in(pool) & asked.candidates
    return _least(instances.loads.prefill_delay_ms, rows, asked) if rows.any() else None


def _least(delay_ms: NDArray[np.float64], rows: NDArray[np.bool_], asked: PrefillAsked) -> int:
    return lowest(among_candidates(delay_ms, rows), asked.turn, tie_break=-asked.cached_tokens)


def _fewest_tokens(instances: ElasticInstances, candidates: NDArray[np.bool_], pool: Pool, turn: int) -> int | None:
    rows = instances.rows_in(pool) & candidates
    return lowest(among_candidates(instances.loads.running_tokens, rows), turn) if rows.any() else None
