"""The content of the engine's prefix cache, and the changes that a monitor has not got yet. Pure."""

from collections.abc import Collection, Iterator
from itertools import chain

from controlplane.model.instance import KvBlocks

MAX_PIECE_BLOCKS = 16_384
"""Blocks named in one message: 128 KiB of hashes."""


class CacheLedger:
    """The hashes of all cached blocks, at most as many as the engine has blocks.

    Within one change of the engine's, removals come before additions.
    """

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self.blocks: set[int] = set()
        self.overflows_total = 0

    def apply(self, change: KvBlocks) -> KvBlocks:
        """Take a change in; returns the change to pass on. More blocks than the engine has mean that removals
        were lost: everything is forgotten, because a wrong index misleads and an empty one only costs hits."""
        if change.cleared:
            self.blocks.clear()
        self.blocks.difference_update(change.removed)
        self.blocks.update(change.stored)
        if len(self.blocks) > self._capacity_blocks:
            self.overflows_total += 1
            self.blocks.clear()
            return KvBlocks(cleared=True)
        return change


class KvBacklog:
    """Updates that one monitor has not got yet: everything at first, then changes, netted while they wait."""

    def __init__(self, max_changes: int) -> None:
        self._max_changes = max_changes
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
            return _everything_pieces(tuple(held), piece_blocks)
        return _change_pieces(changes, piece_blocks)


def _everything_pieces(held: tuple[int, ...], piece_blocks: int) -> Iterator[KvBlocks]:
    yield KvBlocks(cleared=True, stored=held[:piece_blocks])
    for start in range(piece_blocks, len(held), piece_blocks):
        yield KvBlocks(stored=held[start : start + piece_blocks])


def _change_pieces(changes: dict[int, bool], piece_blocks: int) -> Iterator[KvBlocks]:
    removed = tuple(block for block, is_stored in changes.items() if not is_stored)
    stored = tuple(block for block, is_stored in changes.items() if is_stored)
    removals = (KvBlocks(removed=removed[at : at + piece_blocks]) for at in range(0, len(removed), piece_blocks))
    additions = (KvBlocks(stored=stored[at : at + piece_blocks]) for at in range(0, len(stored), piece_blocks))
    return chain(removals, additions)
