"""How kernels cut the KV of a decode batch into tiles, one thread block each."""

from functools import lru_cache

import numpy as np

from simulator.cost.roofline.lengths import MAXIMUM, MINIMUM, DecodeLengths, Numbers
from simulator.cost.spec.device import SplitRule

BLOCK_TOKENS = 128
"""KV tokens that a tile takes in at a time, for heads of 128."""
_ENOUGH_TILES = 0.8
"""FlashAttention-2 does not split where this share of the multiprocessors has a tile already..."""
_GOOD_ENOUGH = 0.85
"""...and else takes the fewest splits whose occupancy is within this share of the best."""
_MAX_EQUAL_SPLITS = 128
_MARGIN = 1.1
"""FlashAttention-3 sizes tiles to an equal share of all blocks for each multiprocessor, times this."""
_MAX_BALANCED_SPLITS = 32
"""What vLLM allows FlashAttention-3 where it captures CUDA graphs."""


def splits_of_longest(rule: SplitRule, lengths: DecodeLengths, heads: int, multiprocessors: int) -> Numbers:
    """Tiles into which the longest sequence's KV is cut, per KV head of `heads`."""
    minimum, maximum = MINIMUM[lengths.is_run], MAXIMUM[lengths.is_run]
    longest_blocks = -(-lengths.longest // BLOCK_TOKENS)
    if rule is SplitRule.BALANCED:
        # The last block of a sequence is half full on average.
        all_blocks = lengths.total / BLOCK_TOKENS + 0.5 * lengths.requests
        share = maximum(all_blocks * heads * (_MARGIN / multiprocessors), 1.0)
        return minimum(longest_blocks // share + 1.0, minimum(longest_blocks, _MAX_BALANCED_SPLITS))
    tiles = lengths.requests * heads
    if tiles >= _ENOUGH_TILES * multiprocessors:
        return longest_blocks // longest_blocks
    if not lengths.is_run:
        return _equal_splits(tiles, int(longest_blocks), multiprocessors)
    distinct, places = np.unique(longest_blocks, return_inverse=True)
    return np.array([_equal_splits(tiles, int(blocks), multiprocessors) for blocks in distinct])[places]


@lru_cache(maxsize=1 << 16)
def _equal_splits(tiles: int, blocks: int, multiprocessors: int) -> int:
    """The fewest splits whose last wave is nearly as full as the fullest possible."""
    candidates = [
        splits
        for splits in range(1, min(_MAX_EQUAL_SPLITS, multiprocessors, blocks) + 1)
        if splits == 1 or -(-blocks // splits) != -(-blocks // (splits - 1))
    ]
    occupancy = {splits: _occupancy(tiles * splits / multiprocessors) for splits in candidates}
    enough = _GOOD_ENOUGH * max(occupancy.values())
    return next(splits for splits in candidates if occupancy[splits] >= enough)


def _occupancy(waves: float) -> float:
    return waves / -(-waves // 1)
