"""Decode attention: tiles of KV spread over the multiprocessors, the longest sequence on the critical path."""

from dataclasses import dataclass

from simulator.cost.roofline.lengths import MAXIMUM, DecodeLengths, Numbers
from simulator.cost.roofline.split_kv import splits_of_longest
from simulator.cost.spec.device import SplitRule


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
    """Of memory, as reached."""
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
