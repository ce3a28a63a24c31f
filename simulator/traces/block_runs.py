"""Names of prefix blocks that run on from one to the next, without a number for each in memory."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray


class BlockRuns(Sequence[int]):
    """first, first + 1, ... for each of some runs (first, count), one after the other. Immutable and hashable.

    The agentic trace has 1,700 blocks a request in one or two runs.
    """

    __slots__ = ("_runs", "_stops")

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self._runs = tuple(runs)
        self._stops = tuple(accumulate(count for _, count in self._runs))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = range(len(self))[index]
        run = bisect_right(self._stops, place)
        first, count = self._runs[run]
        return first + count - self._stops[run] + place

    def __iter__(self) -> Iterator[int]:
        for first, count in self._runs:
            yield from range(first, first + count)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockRuns) and self._runs == other._runs

    def __hash__(self) -> int:
        return hash(self._runs)

    def __repr__(self) -> str:
        return f"BlockRuns({self._runs})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[np.int64]:
        runs = [np.arange(first, first + count, dtype=dtype or np.int64) for first, count in self._runs]
        return np.concatenate(runs) if runs else np.zeros(0, dtype or np.int64)

    def shifted(self, offset: int) -> "BlockRuns":
        """The same runs with every block name larger by `offset`."""
        return BlockRuns([(first + offset, count) for first, count in self._runs])
