"""The attention models of a model on a device."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from simulator.cost.model import PrefillChunk
from simulator.cost.roofline.efficiency import Efficiency
from simulator.cost.roofline.lengths import MAXIMUM, MINIMUM, DecodeLengths, Numbers
from simulator.cost.spec.device import DeviceSpec, SplitRule
from simulator.cost.spec.model import ModelSpec

# How kernels cut the KV of a decode batch into tiles, one thread block each.


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


# Decode attention: tiles of KV spread over the multiprocessors, the longest sequence on the critical path.


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """One layer on one device. docs/cost_models.md derives it."""

    heads: int
    """KV heads on the device; each makes tiles of its own."""
    token_bytes: float
    """KV of one token and one head."""
    partial_bytes: float
    """What a tile of a split sequence leaves for the reduction, per KV head."""
    multiprocessors: int
    slots: int
    """Tiles that are resident at once."""
    bytes_per_ms: float
    """Memory bandwidth that is reached."""
    lone_token_ms: float
    """A tile's time for one token when nothing else asks for memory."""
    kernel_ms: float
    rule: SplitRule
    heterogeneity: bool = True

    def layer_ms(self, lengths: DecodeLengths) -> Numbers:
        """Duration; a number for a step, an array for a run."""
        maximum = MAXIMUM[lengths.is_run]
        if not self.heterogeneity:
            lengths = lengths.levelled()
        splits = splits_of_longest(self.rule, lengths, self.heads, self.multiprocessors)
        tile_tokens = lengths.longest / splits
        # Sequences shorter than a tile are one tile; of longer ones the last tile is half full on average.
        is_split = splits > 1
        tiles = self.heads * (lengths.requests + is_split * lengths.total / tile_tokens)
        shared_token_ms = max(self.lone_token_ms, self.slots * self.token_bytes / self.bytes_per_ms)
        work_ms = lengths.total * (self.heads * shared_token_ms / self.slots)
        waves = tiles / self.slots
        last_wave_ms = work_ms / waves * (-(-waves // 1) - 1)
        # Of k equally long sequences at random places in the batch, the last starts k / (k + 1) through it.
        as_long = lengths.squares / (lengths.longest * lengths.longest)
        start_ms = last_wave_ms * (as_long / (as_long + 1.0))
        tail_ms = maximum(0.0, start_ms + tile_tokens * shared_token_ms - work_ms)
        reduction_ms = is_split * (self.kernel_ms + tiles * (self.partial_bytes / self.bytes_per_ms))
        return self.kernel_ms + work_ms + tail_ms * (self.lone_token_ms / shared_token_ms) + reduction_ms

    def stretch(self, lengths: DecodeLengths) -> Numbers:
        """How many times as long it takes as over equal contexts; a number for a step, an array for a run."""
        return self.layer_ms(lengths) / self.layer_ms(lengths.levelled())

    def beside_prompt_ms(self, lengths: DecodeLengths, level_ms: float) -> float:
        """How much `level_ms`, the time over equal contexts, grows: the rule knows of no difference beside a prompt."""
        return float(level_ms * (self.stretch(lengths) - 1.0))


# Prefill attention of one chunk: arithmetic, or the longest tile where a short chunk makes few of them.


_TILE_QUERIES = 128


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """One layer on one device."""

    heads: int
    """Query heads on the device."""
    flops_per_pair: float
    """Per query head and pair of tokens: scores and weighted values."""
    multiprocessors: int
    flops_per_ms: float
    """Compute rate of the device that is reached."""
    lone_token_ms: float
    """A tile's time for one token of KV when it is bound by streaming it."""
    kernel_ms: float

    def layer_ms(self, chunk: PrefillChunk) -> float:
        """Duration of the chunk's attention to its context and, causally, to itself."""
        pairs = chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2)
        arithmetic_ms = pairs * (self.heads * self.flops_per_pair / self.flops_per_ms)
        rows = min(chunk.new_tokens, _TILE_QUERIES)
        token_ms = max(self.lone_token_ms, rows * self.flops_per_pair * self.multiprocessors / self.flops_per_ms)
        return self.kernel_ms + max(arithmetic_ms, (chunk.context_tokens + chunk.new_tokens) * token_ms)


def decode_attention(
    model: ModelSpec,
    device: DeviceSpec,
    tensor_parallel: int,
    *,
    element_bytes: float = 2.0,
    heterogeneity: bool = True,
    efficiency: Efficiency | None = None,
) -> DecodeAttention:
    """Of one layer's decodes on one of `tensor_parallel` devices; `element_bytes` of KV."""
    efficiency = efficiency or Efficiency()
    query_heads = model.attention_heads // tensor_parallel
    if latent := model.latent:
        heads, token_bytes = 1, latent.cached_elements * element_bytes
        value_dim = latent.kv_rank
    else:
        heads = max(1, model.kv_heads // tensor_parallel)
        token_bytes = 2 * model.head_dim * element_bytes
        value_dim = model.head_dim
    return DecodeAttention(
        heads=heads,
        token_bytes=token_bytes,
        partial_bytes=2 * 4.0 * query_heads / heads * value_dim,  # fp32, written and read
        multiprocessors=device.multiprocessors,
        slots=device.multiprocessors * device.attention_tiles,
        bytes_per_ms=device.memory_bytes_per_s * efficiency.memory / 1000,
        lone_token_ms=token_bytes / efficiency.tile_bytes_per_s * 1000,
        kernel_ms=efficiency.large_kernel_ms,
        rule=device.split_rule,
        heterogeneity=heterogeneity,
    )


def prefill_attention(
    model: ModelSpec, device: DeviceSpec, tensor_parallel: int, efficiency: Efficiency
) -> PrefillAttention:
    """Of one layer's prompt chunks on one of `tensor_parallel` devices."""
    if latent := model.latent:
        pair_elements = latent.nope_dim + latent.rope_dim + latent.value_dim
    else:
        pair_elements = 2 * model.head_dim
    peak = device.flops_per_s["bf16"] / 1000
    return PrefillAttention(
        heads=model.attention_heads // tensor_parallel,
        flops_per_pair=2.0 * pair_elements,
        multiprocessors=device.multiprocessors,
        flops_per_ms=peak * efficiency.prefill_attention_flops,
        lone_token_ms=pair_elements * 2 / efficiency.tile_bytes_per_s * 1000,
        kernel_ms=efficiency.large_kernel_ms,
    )
