"""The content of the engine's prefix cache, and the changes that a monitor has not got yet. Pure."""

from collections.abc import Collection, Iterator
from itertools import chain

from controlplane.model.instance import KvBlocks, KvTier

MAX_PIECE_BLOCKS = 16_384
"""Blocks named in one message: 128 KiB of hashes."""


class CacheLedger:
    """The hashes of all blocks that are cached in one tier, at most as many as it has room for.

    Within one change of the engine's, removals come before additions.
    """

    def __init__(self, capacity_blocks: int, tier: KvTier = KvTier.ENGINE) -> None:
        self.capacity_blocks = capacity_blocks
        self.tier = tier
        self.blocks: set[int] = set()
        self.overflows_total = 0

    def apply(self, change: KvBlocks) -> KvBlocks:
        """Take a change in; returns the change to pass on. More blocks than the engine has mean that removals
        were lost: everything is forgotten, because a wrong index misleads and an empty one only costs hits."""
        if change.cleared:
            self.blocks.clear()
        self.blocks.difference_update(change.removed)
        self.blocks.update(change.stored)
        if len(self.blocks) > self.capacity_blocks:
            self.overflows_total += 1
            self.blocks.clear()
            return KvBlocks(cleared=True, tier=self.tier)
        return change


class KvBacklog:
    """Updates of one tier that one monitor has not got yet: everything at first, then changes, netted while they
    wait."""

    def __init__(self, max_changes: int, tier: KvTier = KvTier.ENGINE) -> None:
        self._max_changes = max_changes
        self._tier = tier
        self._changes: dict[int, bool] = {}
        self._everything = True

    def __bool__(self) -> bool:
        return self._everything or bool(self._changes)

    def restart(self) -> None:
        """The monitor knows nothing: tell it everything next."""
        self._everything = True
        self._changes.clear()

    def add(self, change: KvBlocks) -> None:
        """Note a change. Once the changes that wait are more than the whole cache, the whole cache is sent instead."""
        if change.cleared:
            self.restart()
        if self._everything:
            return
        self._changes.update(dict.fromkeys(change.removed, False))
        self._changes.update(dict.fromkeys(change.stored, True))
        if len(self._changes) > self._max_changes:
            self.restart()

    def take(self, held: Collection[int], piece_blocks: int = MAX_PIECE_BLOCKS) -> Iterator[KvBlocks]:
        """The messages that bring the monitor up to date with `held`, each of at most `piece_blocks`; changes
        noted from now on come on top of them."""
        everything, changes = self._everything, self._changes
        self._everything, self._changes = False, {}
        if everything:
            return _everything_pieces(tuple(held), piece_blocks, self._tier)
        return _change_pieces(changes, piece_blocks, self._tier)


def _everything_pieces(held: tuple[int, ...], piece_blocks: int, tier: KvTier) -> Iterator[KvBlocks]:
    yield KvBlocks(cleared=True, stored=held[:piece_blocks], tier=tier)
    for start in range(piece_blocks, len(held), piece_blocks):
        yield KvBlocks(stored=held[start : start + piece_blocks], tier=tier)


def _change_pieces(changes: dict[int, bool], piece_blocks: int, tier: KvTier) -> Iterator[KvBlocks]:
    removed = tuple(block for block, is_stored in changes.items() if not is_stored)
    stored = tuple(block for block, is_stored in changes.items() if is_stored)
    step = piece_blocks
    removals = (KvBlocks(removed=removed[at : at + step], tier=tier) for at in range(0, len(removed), step))
    additions = (KvBlocks(stored=stored[at : at + step], tier=tier) for at in range(0, len(stored), step))
    return chain(removals, additions)
