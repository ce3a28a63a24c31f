"""Which instances hold which KV blocks: block hash -> set of instances, exact and bounded."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from controlplane.model.block_table import BlockTable
from controlplane.model.holder_sets import HolderSets
from mesh.errors import IllegalTransition
from mesh.invariants import invariants

FEW: Final = 4
"""So many instances are counted one by one, in less time than unpacking their mask takes."""
MANY_LEVELS: Final = 8
"""So many sets of instances are unpacked one by one, in less time than all at once."""


class ValueTable(Protocol):
    """Blocks -> positive ints, at most `max_blocks` of them; `ABSENT`, 0, is the value of all other blocks."""

    max_blocks: int
    places: int

    def __len__(self) -> int: ...

    def get(self, block: int) -> int:
        """The block's value, or `ABSENT`."""

    def gather(self, blocks: Sequence[int]) -> NDArray[np.int32]:
        """Values of the leading blocks: all up to the first that is absent, which is not in the result."""

    def rewrite(self, blocks: Iterable[int], after_of: Mapping[int, int]) -> tuple[dict[int, int], int]:
        """Replace each block's value v by `after_of[v]`, adding and deleting blocks as v or that is `ABSENT`.

        Returns how many blocks had each value that changed, and how many were refused for lack of room.
        """

    def rewrite_places(self, start: int, stop: int, after_of: Mapping[int, int]) -> dict[int, int]:
        """`rewrite` of whatever stands at places `start` to `stop` of `places`; it refuses none."""

    def overflowing(self) -> list[int]:
        """Blocks that stand at no place, so that `rewrite_places` does not reach them."""

    def blocks_by_value(self) -> dict[int, int]:
        """How many blocks have each value."""

    def validate(self) -> None:
        """Raises `InvariantBroken`."""


class PrefixIndex:
    """Answers, for a chain of block hashes, how many leading blocks each instance holds.

    Instances are known by slots, small ints handed out by `add_instance`. A retired slot's blocks disappear
    from `lookup` at once, because callers no longer name it in `among`; its bits are cleared by `sweep`, in
    bounded slices, and only then is the slot handed out again.

    At most `max_blocks` distinct blocks are indexed. Beyond that new blocks are refused, not old ones evicted:
    a refused block reads as not cached (a hole), so placement loses some cache hits and is never wrong about
    the others. `refused_blocks_total` counts them; whoever feeds the index must make that loud.
    """

    def __init__(self, max_blocks: int, table: ValueTable | None = None) -> None:
        """`table`: an empty one of that size; None: a `BlockTable`."""
        self.refused_blocks_total = 0
        self._table: ValueTable = BlockTable(max_blocks) if table is None else table
        self._sets = HolderSets()
        self._held_blocks: list[int] = []
        self._live = 0
        self._free: set[int] = set()
        self._retired = 0
        self._doomed = 0
        self._swept_places = 0

    def __len__(self) -> int:
        """Distinct blocks indexed, those that only retired instances hold included until they are swept."""
        return len(self._table)

    @property
    def max_blocks(self) -> int:
        return self._table.max_blocks

    @property
    def retired_slots(self) -> int:
        """Slots whose bits are not swept yet."""
        return (self._retired | self._doomed).bit_count()

    def add_instance(self) -> int:
        """Reserve a slot for an instance without cached blocks; returns its number."""
        if self._free:
            slot = min(self._free)
            self._free.remove(slot)
        else:
            slot = len(self._held_blocks)
            self._held_blocks.append(0)
        self._live |= 1 << slot
        return slot

    def retire(self, slot: int) -> None:
        """The instance is gone, or holds nothing any more. Constant time; `sweep` does the rest."""
        self._require_live(slot)
        self._live ^= 1 << slot
        if self._held_blocks[slot]:
            self._held_blocks[slot] = 0
            self._retired |= 1 << slot
        else:
            self._free.add(slot)

    @property
    def live_slots(self) -> int:
        """The slots in use, as a bit mask."""
        return self._live

    def held_blocks(self, slot: int) -> int:
        """Number of blocks indexed for the instance in this slot."""
        return self._held_blocks[slot]

    def store(self, slot: int, blocks: Iterable[int]) -> int:
        """The instance holds these blocks now. Returns how many were refused for lack of room."""
        self._require_live(slot)
        bit = 1 << slot
        added, refused = self._rewrite(blocks, lambda mask: mask | bit)
        self._held_blocks[slot] += added
        self.refused_blocks_total += refused
        return refused

    def remove(self, slot: int, blocks: Iterable[int]) -> None:
        """The instance has evicted these blocks; those it was not known to hold (refused ones) are skipped."""
        self._require_live(slot)
        keep = ~(1 << slot)
        removed, _ = self._rewrite(blocks, lambda mask: mask & keep)
        self._held_blocks[slot] -= removed

    def lookup(self, blocks: Sequence[int], among: int) -> NDArray[np.int64]:
        """Leading blocks of the chain held by each instance, by slot.

        `among` is the set of instances asked about, a bit mask over slots; what stands at other slots means
        nothing. The first block that an instance lacks ends its count, whatever it holds further on.
        """
        if not blocks or self._table.get(blocks[0]) == 0:
            return np.zeros(len(self._held_blocks), np.int64)
        set_ids = self._table.gather(blocks)
        run_lasts = (set_ids[1:] != set_ids[:-1]).nonzero()[0]
        masks = self._sets.masks
        survivors, levels, depths = among, [], []
        depth = 0
        for run_last in [*run_lasts.tolist(), len(set_ids) - 1]:
            remaining = survivors & masks[set_ids[depth]]
            if remaining != survivors:
                levels.append(survivors)
                depths.append(depth)
                survivors = remaining
                if not remaining:
                    break
            depth = run_last + 1
        else:
            levels.append(survivors)
            depths.append(depth)
        return self._counts(levels, depths)

    def sweep(self, max_places: int) -> bool:
        """Clear retired instances' bits from so many places of the table; True while there is more to do."""
        if not self._doomed:
            if not self._retired:
                return False
            self._doomed, self._retired = self._retired, 0
            self._swept_places = 0
        stop = min(self._swept_places + max_places, self._table.places)
        after_of = _Transition(self._sets, self._without_doomed)
        self._account(self._table.rewrite_places(self._swept_places, stop, after_of), after_of)
        self._swept_places = stop
        if stop == self._table.places:
            self._rewrite(self._table.overflowing(), self._without_doomed)
            self._free.update(slot for slot in range(len(self._held_blocks)) if self._doomed >> slot & 1)
            self._doomed = 0
        return bool(self._doomed or self._retired)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`. Looks at the whole table."""
        self._table.validate()
        self._sets.validate()
        free = sum(1 << slot for slot in self._free)
        groups = (self._live, free, self._retired | self._doomed)
        assert sum(groups) == (1 << len(self._held_blocks)) - 1, "a slot is in use, free or to be swept"
        assert not self._retired & self._doomed, "a slot is swept once"
        held = [0] * len(self._held_blocks)
        for set_id, blocks in self._table.blocks_by_value().items():
            mask = self._sets.masks[set_id]
            assert self._sets.blocks_of(set_id) == blocks, f"{blocks} blocks name set {set_id}"
            assert not mask & free, "a free slot holds nothing"
            for slot in range(len(held)):
                held[slot] += blocks * (mask >> slot & 1)
        in_use = [count if self._live >> slot & 1 else 0 for slot, count in enumerate(held)]
        assert self._held_blocks == in_use, f"slots hold {in_use} blocks"

    def _without_doomed(self, mask: int) -> int:
        return mask & ~self._doomed

    def _rewrite(self, blocks: Iterable[int], change: Callable[[int], int]) -> tuple[int, int]:
        """Change the holders of these blocks. Returns how many changed and how many were refused."""
        after_of = _Transition(self._sets, change)
        changed, refused = self._table.rewrite(blocks, after_of)
        self._account(changed, after_of)
        return sum(changed.values()), refused

    def _account(self, changed: dict[int, int], after_of: "_Transition") -> None:
        for before, blocks in changed.items():
            self._sets.move(before, after_of[before], blocks)
        for after in after_of.values():
            self._sets.discard_unused(after)

    def _counts(self, levels: list[int], depths: list[int]) -> NDArray[np.int64]:
        """`levels` are nested sets of instances, `depths[k]` the blocks held by those in level k but not k+1."""
        slots = len(self._held_blocks)
        if len(levels) > MANY_LEVELS:
            width_bytes = (slots + 7) // 8
            packed = b"".join([level.to_bytes(width_bytes, "little") for level in levels[1:]])
            rows = np.frombuffer(packed, np.uint8).reshape(-1, width_bytes)
            levels_survived = np.unpackbits(rows, axis=1, count=slots, bitorder="little").sum(axis=0, dtype=np.intp)
            counted: NDArray[np.int64] = np.array(depths, np.int64).take(levels_survived)
            return counted
        counts = np.empty(slots, np.int64)
        counts.fill(depths[0])
        for level, depth in zip(levels[1:], depths[1:], strict=True):
            if level.bit_count() > FEW:
                np.putmask(counts, _members(level, slots), depth)
                continue
            left = level
            while left:
                lowest = left & -left
                counts[lowest.bit_length() - 1] = depth
                left ^= lowest
        return counts

    def _require_live(self, slot: int) -> None:
        if slot < 0 or not self._live >> slot & 1:
            raise IllegalTransition(
                f"prefix index: slot {slot} is not in use (in use: {self._live:b}, being swept: "
                f"{self._retired | self._doomed:b}); an instance must be added before its blocks"
            )


@lru_cache(maxsize=1024)
def _members(mask: int, slots: int) -> NDArray[np.bool_]:
    """Which slots are in the set. The same few sets hold most of what is looked up: system prompts, and a host's."""
    packed = np.frombuffer(mask.to_bytes((slots + 7) // 8, "little"), np.uint8)
    members = np.unpackbits(packed, count=slots, bitorder="little").view(np.bool_)
    members.flags.writeable = False
    return members


class _Transition(dict[int, int]):
    """Set id before -> set id after, worked out once for each set that is met."""

    def __init__(self, sets: HolderSets, change: Callable[[int], int]) -> None:
        self._sets = sets
        self._change = change

    def __missing__(self, before: int) -> int:
        after = self[before] = self._sets.id_of(self._change(self._sets.masks[before]))
        return after
