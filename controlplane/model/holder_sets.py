"""Sets of instances, each stored once: bit masks with small ids and the number of blocks that name them."""

from mesh.invariants import invariants


class HolderSets:
    """Id 0 is the empty set. A set lives as long as a block names it; ids are then handed out again."""

    def __init__(self) -> None:
        self.masks: list[int] = [0]
        """By id; bit `slot` is set for every instance in the set."""
        self._blocks: list[int] = [0]
        self._ids: dict[int, int] = {0: 0}
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def id_of(self, mask: int) -> int:
        """The set's id; call `discard_unused` in the end for one that was asked for and may not be named by a block."""
        set_id = self._ids.get(mask)
        if set_id is None:
            if self._free:
                set_id = self._free.pop()
                self.masks[set_id] = mask
            else:
                set_id = len(self.masks)
                self.masks.append(mask)
                self._blocks.append(0)
            self._ids[mask] = set_id
        return set_id

    def move(self, before: int, after: int, blocks: int) -> None:
        """Count this number of blocks to the set `after` instead of `before`."""
        self._blocks[after] += blocks
        self._blocks[before] -= blocks
        self.discard_unused(before)

    def blocks_of(self, set_id: int) -> int:
        """How many blocks name the set."""
        return self._blocks[set_id]

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`. Holds between the calls of whoever uses the sets, not while blocks are moved."""
        assert all(self.masks[set_id] == mask for mask, set_id in self._ids.items()), "each set is found by its mask"
        assert len(self._ids) + len(self._free) == len(self.masks) == len(self._blocks), "an id is in use or free"
        assert not any(self.masks[set_id] or self._blocks[set_id] for set_id in self._free), "nothing names a free id"
        named = [set_id for set_id in self._ids.values() if set_id]
        assert all(self._blocks[set_id] > 0 for set_id in named), "a set lives while blocks name it, and no longer"

    def discard_unused(self, set_id: int) -> None:
        """Forget the set if no block names it."""
        if self.masks[set_id] and not self._blocks[set_id]:
            del self._ids[self.masks[set_id]]
            self.masks[set_id] = 0
            self._free.append(set_id)
