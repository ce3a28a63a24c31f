"""The KV blocks of an instance: who holds them, which of them are cached prefixes, which is evicted next.

The order is vLLM's (v1 block pool): one queue of free blocks, evicted from the head; a block that nobody holds
keeps its content, and its place in the prefix cache, until it is handed out again. Unlike vLLM's, no block
is set aside as the null block.

Most blocks never have a hash: nobody knows how answers go on, and many traces name no prefix. Those are plain. One
request holds them, so that they are counted and not listed while they are held, and stand in the queue by runs.
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
        self._free: OrderedDict[int, list[int] | None] = OrderedDict()
        """The free queue: a hashed block by itself, or plain ones by the first of them, handed out from their end."""
        self._holders: dict[int, int] = {}
        """Of hashed blocks that somebody holds."""
        self._held_plain = 0
        self._hash_of: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        """Further blocks of the same hash, as arise when a fully cached prompt recomputes its last block."""
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones that nobody holds included."""
        return self.blocks - self.held_blocks

    @property
    def held_blocks(self) -> int:
        """Blocks that at least one request holds."""
        return len(self._holders) + self._held_plain

    @property
    def cached_hashes(self) -> tuple[int, ...]:
        """Everything that the prefix cache could give out."""
        return tuple(self._cached)

    def cached_prefix(self, block_hashes: Sequence[int]) -> list[int]:
        """The blocks to use for a prefix, as far as it is cached."""
        lookup: Callable[[int], int | None] = self._cached.get
        # Long contexts have thousands of blocks: no Python code runs for each.
        return list(takewhile(_IS_BLOCK, map(lookup, block_hashes)))  # type: ignore[arg-type]

    def block_of(self, block_hash: int) -> int | None:
        """The block to use for a hash; None if it is not cached."""
        return self._cached.get(block_hash)

    def held_by_nobody(self, blocks: Sequence[int]) -> int:
        """How many of these hashed blocks are free."""
        return len(blocks) - sum(map(self._holders.__contains__, blocks))

    def hash_of(self, block: int) -> int | None:
        """The hash under which a block is cached."""
        return self._hash_of.get(block)

    def holders_of(self, block: int) -> int:
        """Number of requests that hold the block. Takes long for a plain one."""
        if block in self._hash_of:
            return self._holders.get(block, 0)
        is_free = block >= self._untouched_from or any(run is not None and block in run for run in self._free.values())
        return 0 if is_free else 1

    def hands_out_unseen(self, count: int) -> bool:
        """Whether so many blocks can be handed out without a change of the prefix cache."""
        return not self._cached or count <= self.blocks - self._untouched_from

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks from the head of the queue; their cached content is lost."""
        if count > self.blocks - len(self._holders) - self._held_plain:
            raise IllegalTransition(f"{count} blocks were asked for, {self.free_blocks} are free")
        first = self._untouched_from
        fresh = min(count, self.blocks - first)
        taken = list(range(first, first + fresh))
        self._untouched_from += fresh
        while len(taken) < count:
            taken += self._evict(count - len(taken))
        self._held_plain += count
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks`, cached ones; those that were free leave the queue."""
        held, free = self._holders, self._free
        if held.keys().isdisjoint(blocks):
            for block in blocks:
                del free[block]
            held.update(dict.fromkeys(blocks, 1))
            return
        for block in blocks:
            holders = held.get(block, 0)
            if not holders:
                del free[block]
            held[block] = holders + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One holder fewer for a request's blocks, tail first, so that a prefix outlives what follows it."""
        held, free, hash_of = self._holders, self._free, self._hash_of
        hashed = len(blocks)
        while hashed and blocks[hashed - 1] not in hash_of:
            hashed -= 1
        self._release_plain(blocks[hashed:])
        if not hashed:
            return
        rest = blocks[:hashed]
        if list(map(held.get, rest)).count(1) == hashed:
            for block in rest:
                del held[block]
            free.update(dict.fromkeys(reversed(rest)))
            return
        for block in reversed(rest):
            holders = held.get(block, 0)
            if holders > 1:
                held[block] = holders - 1
            elif holders == 1:
                del held[block]
                free[block] = None
            elif block in hash_of:
                raise IllegalTransition(f"block {block} was freed but nobody holds it")
            else:
                self._release_plain([block])

    def cache(self, blocks: Sequence[int], block_hashes: Sequence[int]) -> None:
        """Offer a request's full blocks, as far as there is a hash for each, to the prefix cache. One that has its hash
        already is left alone."""
        hash_of, cached, removed = self._hash_of, self._cached, self._removed
        for block, block_hash in zip(blocks, block_hashes, strict=False):
            if block in hash_of:
                continue
            hash_of[block] = block_hash
            self._holders[block] = 1
            self._held_plain -= 1
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

    def _evict(self, most: int) -> list[int]:
        """So many blocks at most from the head of the queue, in its order; one that is cached is cached no more."""
        head = next(iter(self._free))
        run = self._free[head]
        if run is None:
            del self._free[head]
            self._forget(head)
            return [head]
        evicted = run[-most:]
        evicted.reverse()
        del run[-most:]
        if not run:
            del self._free[head]
        return evicted

    def _release_plain(self, blocks: Sequence[int]) -> None:
        if blocks:
            self._free[blocks[0]] = list(blocks)
            self._held_plain -= len(blocks)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block)
        if block_hash in self._twins:
            self._forget_twin(block, block_hash)
            return
        del self._cached[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._removed[block_hash] = None

    def _forget_twin(self, block: int, block_hash: int) -> None:
        twins = self._twins[block_hash]
        if self._cached[block_hash] == block:
            self._cached[block_hash] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[block_hash]

    def validate(self) -> None:
        """Raises `IllegalTransition` where the books do not balance."""
        queue = [block for first, run in self._free.items() for block in ([first] if run is None else run)]
        held, free, touched = set(self._holders), set(queue), set(range(self._untouched_from))
        if len(queue) != len(free) or held & free or not (held | free) <= touched:
            raise IllegalTransition(
                f"a touched block is held, or free and queued once: both {held & free}, unknown "
                f"{(held | free) - touched}, {len(queue)} are queued, {len(free)} are free"
            )
        held_plain = touched - held - free
        if len(held_plain) != self._held_plain or not held_plain.isdisjoint(self._hash_of):
            raise IllegalTransition(f"{self._held_plain} plain blocks are held by the count, by the queue {held_plain}")
        for first, run in self._free.items():
            if (first in self._hash_of) != (run is None) or (run is not None and run[:1] != [first]):
                raise IllegalTransition(f"block {first} is queued as the first of {run}")
            if run is not None and not self._hash_of.keys().isdisjoint(run):
                raise IllegalTransition(f"the plain blocks {run} have hashes")
        listed = dict.fromkeys(self._cached.values())
        listed.update(dict.fromkeys(block for twins in self._twins.values() for block in twins))
        if set(listed) != set(self._hash_of):
            raise IllegalTransition(f"cached blocks {set(listed)} differ from hashed blocks {set(self._hash_of)}")
        for block_hash, block in self._cached.items():
            if any(self._hash_of[twin] != block_hash for twin in (block, *self._twins.get(block_hash, ()))):
                raise IllegalTransition(f"hash {block_hash:x} lists a block of another hash")


_IS_BLOCK = partial(is_not, None)
NO_CHANGES = KvBlocks()
