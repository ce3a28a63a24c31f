"""The built-in synthetic trace: conversations that start at random and grow turn by turn."""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from simulator.traces.request import TraceRequest

BLOCK_TOKENS = 16
BLOCKS_PER_SESSION = 1 << 20
"""Stride of the block ids, so that no two conversations share one."""


@dataclass(frozen=True, slots=True)
class SyntheticWorkload:
    """Poisson starts, a geometric number of turns, log-normal lengths, exponential pauses between turns.

    The defaults are of the order of public chat traces (Azure 2023 conversation: median prompt 1020 tokens,
    median answer 129) without being fitted to any.
    """

    duration_s: float = 60.0
    """Nothing arrives later; conversations are cut off there."""
    request_rate_per_s: float = 4.0
    """In the long run, all turns counted; the first seconds see only first turns and so a lower rate."""
    mean_turns: float = 3.0
    mean_pause_s: float = 10.0
    """From one arrival to the next of the same conversation."""
    first_prompt_median_tokens: float = 512.0
    next_prompt_median_tokens: float = 64.0
    output_median_tokens: float = 128.0
    length_sigma: float = 0.7
    """Standard deviation of the logarithm of every length."""
    max_input_tokens: int = 8192
    """A conversation ends rather than grow beyond."""


@dataclass(frozen=True, slots=True, order=True)
class _Turn:
    arrival_s: float
    session: int
    input_tokens: int


def synthetic_trace(workload: SyntheticWorkload, rng: np.random.Generator) -> Iterator[TraceRequest]:
    """The workload's requests in order of arrival; the same `rng` state gives the same trace."""
    session_rate_per_s = workload.request_rate_per_s / workload.mean_turns
    next_start_s = rng.exponential(1 / session_rate_per_s)
    session = 0
    pending: list[_Turn] = []
    while True:
        if not pending or next_start_s <= pending[0].arrival_s:
            if next_start_s >= workload.duration_s and not pending:
                return
            if next_start_s < workload.duration_s:
                first_tokens = _length(workload.first_prompt_median_tokens, workload, rng)
                heapq.heappush(pending, _Turn(next_start_s, session, min(first_tokens, workload.max_input_tokens)))
                session += 1
                next_start_s += rng.exponential(1 / session_rate_per_s)
                continue
        turn = heapq.heappop(pending)
        output_tokens = _length(workload.output_median_tokens, workload, rng)
        yield _request(turn, output_tokens)
        following = _next_turn(turn, output_tokens, workload, rng)
        if following is not None:
            heapq.heappush(pending, following)


def _next_turn(turn: _Turn, output_tokens: int, workload: SyntheticWorkload, rng: np.random.Generator) -> _Turn | None:
    if rng.random() < 1 / workload.mean_turns:
        return None
    arrival_s = turn.arrival_s + rng.exponential(workload.mean_pause_s)
    message_tokens = _length(workload.next_prompt_median_tokens, workload, rng)
    input_tokens = turn.input_tokens + output_tokens + message_tokens
    if arrival_s >= workload.duration_s or input_tokens > workload.max_input_tokens:
        return None
    return _Turn(arrival_s, turn.session, input_tokens)


def _length(median_tokens: float, workload: SyntheticWorkload, rng: np.random.Generator) -> int:
    drawn = rng.lognormal(math.log(median_tokens), workload.length_sigma)
    return max(1, min(round(drawn), workload.max_input_tokens))


def _request(turn: _Turn, output_tokens: int) -> TraceRequest:
    first_id = turn.session * BLOCKS_PER_SESSION
    return TraceRequest(
        arrival_s=turn.arrival_s,
        input_tokens=turn.input_tokens,
        output_tokens=output_tokens,
        prefix_block_ids=tuple(range(first_id, first_id + -(-turn.input_tokens // BLOCK_TOKENS))),
        block_tokens=BLOCK_TOKENS,
        session_id=str(turn.session),
    )
