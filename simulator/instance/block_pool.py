"""The KV blocks of an instance: who holds them, which of them are cached prefixes, which is evicted next.

The order is vLLM's (v1 block pool): one queue of free blocks, evicted from the head; a block that nobody holds
keeps its content, and its place in the prefix cache, until it is handed out again. Unlike vLLM's, no block
is set aside as the null block.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from operator import is_not

from controlplane.model.instance import KvBlocks
from mesh.errors import IllegalTransition


class BlockPool:
    """Blocks 0 .. `blocks` - 1. Only touched blocks cost memory."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._untouched_from = 0
        """Blocks from here on were never handed out; they are the head of the free queue."""
        self._free: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        """Further blocks of the same hash, as arise when a fully cached prompt recomputes its last block."""
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones that nobody holds included."""
        return self.blocks - len(self._holders)

    @property
    def held_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return len(self._holders)

    @property
    def cached_hashes(self) -> tuple[int, ...]:
        """Everything that the prefix cache could give out."""
        return tuple(self._cached)

    def cached_prefix(self, block_hashes: Sequence[int]) -> list[int]:
        """The blocks to use for a prefix, as far as it is cached."""
        lookup: Callable[[int], int | None] = self._cached.get
        # Long contexts have thousands of blocks: no Python code runs for each.
        return list(takewhile(_IS_BLOCK, map(lookup, block_hashes)))  # type: ignore[arg-type]

    def held_by_nobody(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are free."""
        return len(blocks) - sum(map(self._holders.__contains__, blocks))

    def hash_of(self, block: int) -> int | None:
        """The hash under which a block is cached."""
        return self._hash_of.get(block)

    def holders_of(self, block: int) -> int:
        """Number of requests that hold the block."""
        return self._holders.get(block, 0)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the queue; their cached content is lost."""
        if count > self.free_blocks:
            raise IllegalTransition(f"{count} blocks were asked for, {self.free_blocks} are free")
        taken: list[int] = []
        for _ in range(count):
            if self._untouched_from < self.blocks:
                block = self._untouched_from
                self._untouched_from += 1
            else:
                block, _ = self._free.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`, cached ones; those that were free leave the queue."""
        held, free = self._holders, self._free
        for block in blocks:
            holders = held.get(block, 0)
            if not holders:
                del free[block]
            held[block] = holders + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for a request's blocks, tail first, so that a prefix outlives what follows it."""
        held, free = self._holders, self._free
        for block in reversed(blocks):
            holders = held.get(block, 0)
            if holders > 1:
                held[block] = holders - 1
            elif holders == 1:
                del held[block]
                free[block] = None
            else:
                raise IllegalTransition(f"block {block} was freed but nobody holds it")

    def cache(self, blocks: Sequence[int], block_hashes: Sequence[int]) -> None:
        """Offer full blocks, as far as there is a hash for each, to the prefix cache. One that has its hash already is
        left alone."""
        hash_of, cached, removed = self._hash_of, self._cached, self._removed
        for block, block_hash in zip(blocks, block_hashes, strict=False):
            if block in hash_of:
                continue
            hash_of[block] = block_hash
            if block_hash in cached:
                self._twins.setdefault(block_hash, []).append(block)
                continue
            cached[block_hash] = block
            if block_hash in removed:
                del removed[block_hash]
            else:
                self._stored[block_hash] = None

    def take_changes(self) -> KvBlocks:
        """Net change of the prefix cache since the last call."""
        if not self._stored and not self._removed:
            return NO_CHANGES
        changes = KvBlocks(stored=tuple(self._stored), removed=tuple(self._removed))
        self._stored = {}
        self._removed = {}
        return changes

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        twins = self._twins.get(block_hash)
        if twins is None:
            del self._cached[block_hash]
            if block_hash in self._stored:
                del self._stored[block_hash]
            else:
                self._removed[block_hash] = None
            return
        if self._cached[block_hash] == block:
            self._cached[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]

    def validate(self) -> None:
        """Raises `IllegalTransition` where the books do not balance."""
        held, free = set(self._holders), set(self._free)
        touched = set(range(self._untouched_from))
        if held & free or held | free != touched:
            raise IllegalTransition(
                f"every touched block must be either held or free: both {held & free}, neither "
                f"{touched - held - free}, unknown {(held | free) - touched}"
            )
        listed = dict.fromkeys(self._cached.values())
        listed.update(dict.fromkeys(block for twins in self._twins.values() for block in twins))
        if set(listed) != set(self._hash_of):
            raise IllegalTransition(f"cached blocks {set(listed)} differ from hashed blocks {set(self._hash_of)}")
        for block_hash, block in self._cached.items():
            if any(self._hash_of[twin] != block_hash for twin in (block, *self._twins.get(block_hash, ()))):
                raise IllegalTransition(f"hash {block_hash:x} lists a block of another hash")


_IS_BLOCK = partial(is_not, None)
NO_CHANGES = KvBlocks()
