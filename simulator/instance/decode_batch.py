"""The requests that decode, kept so that a step in which nothing special happens costs O(1).

Every decoding request gains one token a step, so none is touched for it: a clock counts steps, and each request
keeps the clock reading from which its length follows. What does need a hand (a new block every `block_tokens`
tokens, the end) is filed under the clock reading at which it is due. Blocks and ends are thus amortised over
block_tokens and output tokens instead of being asked for at every step.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from simulator.instance.sequence import Sequence, SequenceState

_FORGOTTEN_GROWTHS = 64
"""Of clock readings that have passed: so many are kept before they are cleared away together."""


class DecodeBatch:
    """Decoding requests in slots 0 .. len - 1, in no particular order."""

    def __init__(self, max_requests: int, block_tokens: int) -> None:
        self.clock = 0
        """Steps that the instance has finished."""
        self.sequences: list[Sequence] = []
        self.cache_growers = 0
        """Requests whose next full block may be new to the prefix cache."""
        self._block_tokens = block_tokens
        self._bases: NDArray[np.int64] = np.zeros(max_requests, dtype=np.int64)
        self._base_sum = 0
        self._growth: dict[int, list[Sequence]] = {}
        self._ends: list[tuple[int, int, Sequence]] = []
        self._joins = 0

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def context_tokens_sum(self) -> int:
        """Prompt and generated tokens of all decoding requests."""
        return self._base_sum + len(self.sequences) * self.clock

    def context_tokens(self) -> NDArray[np.int64]:
        """Context length of each request, prompt and generated tokens; shape (requests,)."""
        contexts: NDArray[np.int64] = self._bases[: len(self.sequences)] + self.clock
        return contexts

    def tokens_of(self, sequence: Sequence) -> int:
        """Prompt and generated tokens of a decoding request."""
        return sequence.decode_base + self.clock

    def join(self, sequence: Sequence) -> None:
        """A request in state DECODE starts to decode with the next step."""
        base = sequence.decode_base = sequence.tokens - self.clock
        sequence.slot = len(self.sequences)
        self.sequences.append(sequence)
        self._bases[sequence.slot] = base
        self._base_sum += base
        sequence.grows_cache = sequence.text is not None or len(sequence.hashes) > sequence.hashed_blocks
        self.cache_growers += sequence.grows_cache
        self._joins += 1
        sequence.join = self._joins
        heappush(self._ends, (sequence.total_tokens - base, self._joins, sequence))
        self.file_growth(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Freeze a request's length and forget it."""
        sequence.tokens = self.tokens_of(sequence)
        sequence.computed_tokens = sequence.tokens - 1
        self._base_sum -= sequence.decode_base
        self.cache_growers -= sequence.grows_cache
        last = self.sequences.pop()
        if last is not sequence:
            self.sequences[sequence.slot] = last
            self._bases[sequence.slot] = last.decode_base
            last.slot = sequence.slot
        sequence.slot = -1
        sequence.growth_due = -1

    def file_growth(self, sequence: Sequence) -> None:
        """Note when the request outgrows the blocks it now holds."""
        due = len(sequence.blocks) * self._block_tokens + 1 - sequence.decode_base
        sequence.growth_due = due
        self._growth.setdefault(due, []).append(sequence)

    def postpone_growth(self, due: list[Sequence], steps_ahead: int) -> None:
        """All that are due for growth in the step after the next `steps_ahead` have got the block."""
        due_at = self.clock + steps_ahead + self._block_tokens
        for sequence in due:
            sequence.growth_due = due_at
        self._growth.setdefault(due_at, []).extend(due)

    def due_for_growth(self, steps_ahead: int) -> list[Sequence]:
        """Requests that need one more block in the step after the next `steps_ahead`, best served first."""
        due_at = self.clock + steps_ahead
        filed = self._growth.get(due_at)
        if filed is None:
            return []
        due = [sequence for sequence in filed if sequence.growth_due == due_at]
        if len(due) > 1:
            due = sorted(set(due), key=_key)
        return due

    def growth_counts(self) -> tuple[int, ...]:
        """How many blocks the requests need for the first 0, 1, ... `block_tokens` steps after the next one, together.
        Each request needs one a period, so that the counts repeat."""
        counts = [0] * (self._block_tokens + 1)
        for sequence in self.sequences:
            counts[sequence.growth_due - self.clock] += 1
        return tuple(accumulate(counts))

    def growth_ahead(self, first_ahead: int, stop_ahead: int) -> Iterator[int]:
        """Those of the steps first_ahead .. stop_ahead - 1 from now in which requests may need a block; growth that is
        filed meanwhile included."""
        growth = self._growth
        for due_at in range(self.clock + first_ahead, self.clock + stop_ahead):
            if due_at in growth:
                yield due_at - self.clock

    def steps_to_next_end(self) -> int:
        """Steps until the first request ends, the step of the end included; call with requests in the batch."""
        while not self._is_current(*self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] - self.clock

    def advance(self, steps: int) -> list[Sequence]:
        """Let every request gain `steps` tokens; returns those that thereby end, still in the batch."""
        self.clock += steps
        if len(self._growth) > 2 * len(self.sequences) + _FORGOTTEN_GROWTHS:
            self._growth = {due_at: filed for due_at, filed in self._growth.items() if due_at >= self.clock}
        ended: list[Sequence] = []
        while self._ends and self._ends[0][0] <= self.clock:
            entry = heappop(self._ends)
            if self._is_current(*entry):
                ended.append(entry[2])
        return ended

    def is_filed(self, sequence: Sequence) -> bool:
        """Whether its next block and its end are noted where they will be found."""
        return sequence in self._growth.get(sequence.growth_due, ()) and any(
            self._is_current(*entry) and entry[2] is sequence for entry in self._ends
        )

    def _is_current(self, _: int, join: int, sequence: Sequence) -> bool:
        # One that left and came back may be due at the same clock reading as before; it ends only once.
        return sequence.state is SequenceState.DECODE and sequence.join == join


def _key(sequence: Sequence) -> tuple[int, int]:
    return sequence.key
