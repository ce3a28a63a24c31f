"""Which KV blocks each instance could load from the memory of its host."""

from collections.abc import Iterable

import msgspec
import numpy as np

from controlplane.model.instance import InstanceDescription, KvBlocks
from controlplane.model.prefix_index import PrefixIndex
from controlplane.model.snapshot import Integers, Snapshot
from mesh.invariants import invariants


class TierSlots(msgspec.Struct, frozen=True, eq=False):
    """Where the instances of a snapshot, and what they could load, stand in the prefix index."""

    instances: tuple[InstanceDescription, ...]
    slots: Integers
    """A row for the instances themselves, and one for each tier of which any of them has told; a column for each
    instance. Where one has told of nothing, any slot."""
    block_tokens: Integers
    """Of a block there; 0 where the instance has told of nothing."""
    slots_mask: int
    """Those slots of the tiers, as a bit mask."""

    @classmethod
    def of(cls, snapshot: Snapshot, tiers: Iterable["HostBlocks"]) -> "TierSlots":
        told = [[tier.slot(each.instance_id) for each in snapshot.instances] for tier in tiers]
        told = [slots for slots in told if any(slot is not None for slot in slots)]
        return cls(
            snapshot.instances,
            np.array([snapshot.slots, *([slot or 0 for slot in slots] for slots in told)], np.int64),
            np.array(
                [
                    snapshot.block_tokens,
                    *(np.where([slot is None for slot in slots], 0, snapshot.block_tokens) for slots in told),
                ]
            ),
            sum(1 << slot for slots in told for slot in slots if slot is not None),
        )


class HostBlocks:
    """What hosts hold, as their instances tell: each tells of all that it sees in its host's store.

    It stands in the index of what the instances themselves hold, each instance under a second slot: one look-up answers
    for both (with two of them a decision took a quarter longer), and a block that is in both places is stored once.
    That a host's blocks are told of by every instance there costs messages, but no memory (a set of instances is stored
    once), and nothing has to be decided when one of them dies: the others have told of the same.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._slots: dict[str, int] = {}
        """Of each instance that has told of blocks."""
        self.slots_mask = 0
        """Those slots, as a bit mask."""

    def update(self, instance_id: str, blocks: KvBlocks) -> int:
        """An instance's host has other blocks now. Returns how many the index refused."""
        if blocks.cleared:
            self.lost(instance_id)
        if instance_id not in self._slots:
            if not blocks.stored:
                return 0
            slot = self._slots[instance_id] = self._index.add_instance()
            self.slots_mask |= 1 << slot
        slot = self._slots[instance_id]
        self._index.remove(slot, blocks.removed)
        return self._index.store(slot, blocks.stored)

    def lost(self, instance_id: str) -> None:
        """The instance is gone, or its host has no blocks."""
        slot = self._slots.pop(instance_id, None)
        if slot is not None:
            self._index.retire(slot)
            self.slots_mask ^= 1 << slot

    def held(self, instance_id: str) -> int:
        """How many blocks an instance could load."""
        slot = self._slots.get(instance_id)
        return 0 if slot is None else self._index.held_blocks(slot)

    def slot(self, instance_id: str) -> int | None:
        """Where what the instance could load stands in the index; None: it has told of nothing."""
        return self._slots.get(instance_id)

    @invariants
    def validate(self) -> None:
        """Raises `InvariantBroken`; without a look at the index itself, which takes long."""
        slots = sum(1 << slot for slot in self._slots.values())
        assert slots == self.slots_mask, "a slot for each instance"

    def instance_ids(self) -> frozenset[str]:
        """Of those that have told of blocks."""
        return frozenset(self._slots)
