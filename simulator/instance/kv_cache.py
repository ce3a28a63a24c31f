"""KV memory as requests use it: prefix hits, growth, release, and the bytes behind the blocks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from controlplane.model.prefix_hash import ROOT_HASH
from mesh.errors import IllegalTransition
from simulator.instance.block_pool import BlockPool
from simulator.instance.config import InstanceConfig
from simulator.instance.sequence import Sequence
from simulator.instance.splitmix import splitmix_words, stream_words
from simulator.instance.tokens import RequestTokens

# The bytes that stand for the KV of a block.
#
# As with a real KV cache, what a slot holds depends on its own token and on every token before it, so a block that
# was swapped with another, shifted, torn or taken from another request shows in its bytes.


def kv_block_bytes(token_ids: NDArray[np.uint32], parent_hash: int, block_tokens: int, block_bytes: int) -> bytes:
    """Bytes of a block whose first len(token_ids) slots are filled; the slots after them are zero.

    `parent_hash` is the hash of the block before it in the request's chain.
    """
    view = memoryview(token_ids.astype(np.uint32).tobytes())
    keys = np.array(
        [xxh3_64_intdigest(view[: 4 * (slot + 1)], parent_hash) for slot in range(len(token_ids))],
        dtype=np.uint64,
    )
    slot_bytes = block_bytes // block_tokens
    indices = np.arange(-(-slot_bytes // 8), dtype=np.uint64)
    slots = splitmix_words(keys[:, None], indices[None, :]).view(np.uint8)[:, :slot_bytes]
    return slots.tobytes().ljust(block_bytes, b"\0")


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block of the prefix cache."""

    block_id: int
    text: RequestTokens
    """Of the request that filled it."""
    index: int
    """Which of the request's blocks it is."""


class KvCache:
    """Gives blocks to requests and takes them back; every block of a request passes through here."""

    def __init__(self, config: InstanceConfig) -> None:
        self.pool = BlockPool(config.kv_blocks)
        self._block_tokens = config.block_tokens
        self._block_bytes = config.block_bytes
        self._written_by: dict[int, tuple[Sequence, int]] = {}
        """Whose tokens a block holds, and which of its blocks it is; only for requests with token ids."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of `tokens` tokens."""
        return -(-tokens // self._block_tokens)

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks of its prefix; never all its tokens, since the last one must be computed for its output."""
        if sequence.text is None and not sequence.hashes:
            return []
        most = (sequence.tokens - 1) // self._block_tokens
        if most and sequence.text is not None:
            sequence.hash_of_block(most - 1, self._block_tokens)
        return self.pool.cached_prefix(sequence.hashes[:most])

    def fits(self, prefix: list[int], blocks: int) -> bool:
        """Whether a request that takes the cached `prefix` can get `blocks` blocks in all."""
        from_queue = self.pool.held_by_nobody(prefix)
        return blocks - len(prefix) + from_queue <= self.pool.free_blocks

    def take_prefix(self, sequence: Sequence, prefix: list[int]) -> None:
        """Share a cached prefix; its tokens count as computed."""
        self.pool.share(prefix)
        sequence.blocks = list(prefix)
        sequence.hashed_blocks = len(prefix)
        sequence.computed_tokens = len(prefix) * self._block_tokens

    def grow(self, sequence: Sequence, tokens: int) -> None:
        """Give it the blocks that it lacks for `tokens` tokens; they must be free."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return
        fresh = self.pool.allocate(missing)
        if sequence.text is not None:
            for index, block in enumerate(fresh, start=len(sequence.blocks)):
                self._written_by[block] = (sequence, index)
        elif self._written_by:
            for block in fresh:
                self._written_by.pop(block, None)
        sequence.blocks += fresh

    def grow_each(self, sequences: list[Sequence]) -> None:
        """Give each of these requests without token ids one more block, in their order; they must be free."""
        fresh = self.pool.allocate(len(sequences))
        if self._written_by:
            for block in fresh:
                self._written_by.pop(block, None)
        for sequence, block in zip(sequences, fresh, strict=True):
            sequence.blocks.append(block)

    def remember(self, sequence: Sequence, computed_tokens: int) -> None:
        """Offer its full blocks to the prefix cache."""
        first, full_blocks = sequence.hashed_blocks, computed_tokens // self._block_tokens
        if full_blocks <= first:
            return
        if sequence.text is not None:
            sequence.hash_of_block(full_blocks - 1, self._block_tokens)
        self.pool.cache(sequence.blocks[first:full_blocks], sequence.hashes[first:full_blocks])
        sequence.hashed_blocks = full_blocks

    def name_own_blocks(self, sequence: Sequence) -> None:
        """Give the full blocks of a request that nobody knows the tokens of hashes of its own, so that it finds them
        when it comes back, as in vLLM, where every full block has a hash. No other request has them. Only those that
        are preempted get them: hashes for all would cost every long run its speed, and nobody else would ask."""
        full_blocks = sequence.computed_tokens // self._block_tokens
        known = len(sequence.hashes)
        if sequence.text is not None or full_blocks <= known:
            return
        own = xxh3_64_intdigest(sequence.request_id.encode())
        sequence.hashes += stream_words(own, known, full_blocks - known).tolist()
        sequence.hashed_blocks = min(sequence.hashed_blocks, known)

    def release(self, sequence: Sequence) -> None:
        """Take all its blocks back, the computed full ones into the prefix cache."""
        self.remember(sequence, sequence.computed_tokens)
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.hashed_blocks = 0

    def has_hash_for(self, sequence: Sequence, block_index: int) -> bool:
        """Whether remembering its block would change the prefix cache."""
        known = sequence.text is not None or block_index < len(sequence.hashes)
        return known and block_index >= sequence.hashed_blocks

    def expected_bytes(self, sequence: Sequence, index: int, computed_tokens: int) -> bytes:
        """What its block `index` holds once `computed_tokens` of its tokens are computed."""
        start = index * self._block_tokens
        stop = min(start + self._block_tokens, max(computed_tokens, start))
        parent = sequence.hash_of_block(index - 1, self._block_tokens) if index else _root_hash(sequence)
        return kv_block_bytes(
            _token_ids(sequence, start, stop), parent or ROOT_HASH, self._block_tokens, self._block_bytes
        )

    def block_bytes(self, block: int, computed_tokens: int) -> bytes:
        """What a block holds now, `computed_tokens` being the progress of the request that fills it."""
        writer = self._written_by.get(block)
        cached = self.pool.hash_of(block) is not None
        if writer is None or not (cached or self.pool.holders_of(block)):
            raise IllegalTransition(f"block {block} holds no KV of a request with token ids; it cannot be read")
        sequence, index = writer
        full = (index + 1) * self._block_tokens
        return self.expected_bytes(sequence, index, full if cached else computed_tokens)

    def writer_of(self, block: int) -> Sequence | None:
        """The request whose tokens a block holds."""
        writer = self._written_by.get(block)
        return writer[0] if writer else None

    def cached_block(self, block_hash: int) -> CachedBlock | None:
        """What is cached under a hash, where its tokens are known."""
        block = self.pool.block_of(block_hash)
        writer = None if block is None else self._written_by.get(block)
        if block is None or writer is None or writer[0].text is None:
            return None
        return CachedBlock(block, writer[0].text, writer[1])


def _root_hash(sequence: Sequence) -> int:
    return ROOT_HASH if sequence.text is None else sequence.text.root_hash


def _token_ids(sequence: Sequence, start: int, stop: int) -> NDArray[np.uint32]:
    if sequence.text is None:
        raise IllegalTransition(f"{sequence.story()} has no token ids, hence no KV bytes")
    return sequence.text.between(start, stop)
