"""The table of a simulated scheduler's prefix index: a plain dict from block hashes to values.

The live `BlockTable` is made for lookups among a million blocks in bounded memory and takes a microsecond a block to
update. In a simulation updates are most of what an index does: a fifth of a run of long contexts went there.
A report names blocks that mostly share one value, so a dict takes them in at once, without Python code for each.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat, takewhile

import numpy as np
from numpy.typing import NDArray

from controlplane.model.block_table import ABSENT
from mesh.invariants import invariants


class BlockDict:
    """See `BlockTable`: equal calls give equal answers, if `after_of` leaves alone what it has given out, as storing
    and removing do."""

    places = 1
    """All blocks count as one place, for `rewrite_places`."""

    def __init__(self, max_blocks: int) -> None:
        if max_blocks <= 0:
            raise ValueError(f"max_blocks must be positive, got {max_blocks}")
        self.max_blocks = max_blocks
        self._values: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, block: int) -> int:
        """The block's value or `ABSENT`."""
        return self._values.get(block, ABSENT)

    def gather(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Values of the leading blocks: all up to the first that is absent, which is not in the result."""
        return np.array(list(takewhile(ABSENT.__ne__, map(self._values.get, blocks, repeat(ABSENT)))), np.int32)

    def rewrite(self, blocks: Iterable[int], after_of: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """Replace each block's value v by `after_of[v]`, adding and deleting blocks as v or that is `ABSENT`.

        Returns how many blocks had which value before (those left as they were not counted), and how many were refused.
        """
        changed: dict[int, int] = {}
        refused = 0
        asked = tuple(blocks)
        named = tuple(dict.fromkeys(asked))
        befores = tuple(map(self._values.get, named, repeat(ABSENT)))
        for before in dict.fromkeys(befores):
            after = after_of[before]
            if after == before:
                continue
            same = named
            if befores.count(before) < len(named):
                same = tuple([block for block, value in zip(named, befores, strict=True) if value == before])
            if before == ABSENT:
                room = self.max_blocks - len(self._values)
                left_out = set(same[room:])
                refused += sum(block in left_out for block in asked) if left_out else 0
                same = same[:room]
            if after == ABSENT:
                for block in same:
                    del self._values[block]
            else:
                self._values.update(dict.fromkeys(same, after))
            if same:
                changed[before] = len(same)
        return changed, refused

    def rewrite_places(self, start: int, stop: int, after_of: Mapping[int, int]) -> dict[int, int]:
        """The same for all blocks, if the one place is among start to stop."""
        return self.rewrite(tuple(self._values), after_of)[0] if start <= 0 < stop else {}

    def overflowing(self) -> list[int]:
        """None: every block has its place."""
        return []

    def blocks_by_value(self) -> dict[int, int]:
        """How many blocks have each value."""
        values, counts = np.unique(np.array(list(self._values.values()), np.int32), return_counts=True)
        return dict(zip(values.tolist(), counts.tolist(), strict=True))

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`."""
        assert len(self._values) <= self.max_blocks, "blocks are bounded"
        assert ABSENT not in self._values.values(), "a block that is there has a value"
