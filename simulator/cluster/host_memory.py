"""KV blocks in the memory of hosts, each shared by the instances that run there."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import filterfalse, takewhile

from controlplane.model.instance import KvBlocks, KvTier


class HostMemory:
    """Blocks by content, the ones used longest ago going first. Each block that an instance of the host has computed is
    copied here at once, so that it is still there when the instance evicts it."""

    def __init__(self, blocks: int) -> None:
        self.max_blocks = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def store(self, block_hashes: Sequence[int]) -> KvBlocks:
        """These have been computed; of a chain the later ones go first. Returns what has changed by that."""
        blocks = self._blocks
        stored = dict.fromkeys(filterfalse(blocks.__contains__, block_hashes))
        blocks.update(dict.fromkeys(block_hashes))
        _call_for_each(blocks.move_to_end, reversed(block_hashes))
        removed = [blocks.popitem(last=False)[0] for _ in range(len(blocks) - self.max_blocks)]
        gone = stored.keys() & frozenset(removed)
        if gone:  # more than there is room for at all
            removed = [block_hash for block_hash in removed if block_hash not in gone]
            stored = dict.fromkeys(block_hash for block_hash in stored if block_hash not in gone)
        return KvBlocks(tuple(stored), tuple(removed), tier=KvTier.HOST)

    def content(self) -> KvBlocks:
        """All that is here, for an instance that has just joined."""
        return KvBlocks(tuple(self._blocks), cleared=True, tier=KvTier.HOST)

    def leading(self, chain: Sequence[int]) -> int:
        """How many leading blocks of the chain are here."""
        return len(list(takewhile(self._blocks.__contains__, chain)))

    def use(self, chain: Sequence[int]) -> None:
        """The chain's blocks that are here are used now."""
        blocks = self._blocks
        _call_for_each(blocks.move_to_end, filter(blocks.__contains__, reversed(chain)))


def _call_for_each(function: Callable[[int], None], block_hashes: Iterable[int]) -> None:
    """Contexts have thousands of blocks: no Python code runs for each."""
    deque(map(function, block_hashes), maxlen=0)
