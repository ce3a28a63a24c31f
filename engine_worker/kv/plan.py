"""Which bytes travel in which message. Pure: both sides compute it and need not tell each other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from mesh.errors import KvTransferRefused

BlockIds: TypeAlias = NDArray[np.int64]


class Run(NamedTuple):
    """Blocks that are consecutive on both sides."""

    source_block: int
    target_block: int
    blocks: int


class RegionBlocks(NamedTuple):
    """Blocks of one region, in the order in which they travel."""

    region: int
    ids: BlockIds


class Message(NamedTuple):
    """The blocks that one message carries, of one region after another."""

    blocks: tuple[RegionBlocks, ...]
    nbytes: int


def joint_runs(source_block_ids: Sequence[int], target_block_ids: Sequence[int]) -> list[Run]:
    """The two lists, which pair up, as runs."""
    runs: list[Run] = []
    first = 0
    for index in range(1, len(source_block_ids) + 1):
        if (
            index == len(source_block_ids)
            or source_block_ids[index] != source_block_ids[index - 1] + 1
            or target_block_ids[index] != target_block_ids[index - 1] + 1
        ):
            runs.append(Run(source_block_ids[first], target_block_ids[first], index - first))
            first = index
    return runs


def check_block_ids(source_block_ids: Sequence[int], target_block_ids: Sequence[int], target_blocks: int) -> None:
    """Raises `KvTransferRefused` for lists that do not pair up or that would write outside or twice."""
    if not source_block_ids:
        raise KvTransferRefused("no block is named; name at least one")
    if len(source_block_ids) != len(target_block_ids):
        raise KvTransferRefused(
            f"{len(source_block_ids)} source blocks and {len(target_block_ids)} target blocks do not pair up"
        )
    if min(source_block_ids) < 0 or min(target_block_ids) < 0 or max(target_block_ids) >= target_blocks:
        raise KvTransferRefused(f"block ids are from 0 on and below {target_blocks} at the target")
    if len(set(target_block_ids)) != len(target_block_ids):
        raise KvTransferRefused("a target block is named twice; each can be written only once")


class Packing(msgspec.Struct, frozen=True):
    """How blocks are packed into messages; the fields are those of the settings."""

    message_bytes: int
    gathered_bytes: int
    direct_bytes: int


def plan_messages(
    runs: Sequence[tuple[int, int]], region_block_bytes: Sequence[int], packing: Packing
) -> Iterator[Message]:
    """The messages of runs, each a first block and a number of blocks, region by region.

    A run that is at least `direct_bytes` long in a region is cut into messages of its own, so that it can travel
    without a copy. Shorter ones are packed together. No message carries part of a block's bytes in a region, so
    none of these must be larger than `message_bytes`. Which run travels in which message follows from the numbers of
    blocks alone, which both sides have; where the runs begin is each side's own.
    """
    orders = {block_bytes: _Order(runs, block_bytes, packing) for block_bytes in set(region_block_bytes)}
    packed: list[RegionBlocks] = []
    packed_bytes = 0
    for region, block_bytes in enumerate(region_block_bytes):
        order = orders[block_bytes]
        first, long = 0, 0
        while first < len(order.short):
            end = order.last_within(first, packing.gathered_bytes - packed_bytes)
            if end > first:
                blocks = order.blocks(first, end)
                packed.append(RegionBlocks(region, blocks))
                packed_bytes += len(blocks) * block_bytes
                first = end
            if end < len(order.short):
                while long < len(order.long) and order.long[long] < order.short[end]:
                    yield from order.cut(region, long)
                    long += 1
                yield Message(tuple(packed), packed_bytes)
                packed, packed_bytes = [], 0
        for each in range(long, len(order.long)):
            yield from order.cut(region, each)
    if packed:
        yield Message(tuple(packed), packed_bytes)


class _Order:
    """The runs in regions whose blocks have so many bytes: which are short, and their blocks one after another.

    In arrays, because a transfer has thousands of blocks: with one Python object for each block of each region, a plan
    took each side six times as long, and a GPU's copies wait for it.
    """

    def __init__(self, runs: Sequence[tuple[int, int]], block_bytes: int, packing: Packing) -> None:
        starts, counts = np.array(runs, np.int64).reshape(-1, 2).T
        is_long = counts * block_bytes >= packing.direct_bytes
        self.short, self.long = np.flatnonzero(~is_long), np.flatnonzero(is_long)
        """Numbers of the runs."""
        self._block_bytes = block_bytes
        self._message_blocks = packing.message_bytes // block_bytes
        self._long_runs = [runs[number] for number in self.long]
        counts = counts[self.short]
        self._ends = np.cumsum(counts)
        """Where each of the short runs ends in `_blocks`."""
        firsts = starts[self.short] - (self._ends - counts)
        self._blocks: BlockIds = np.repeat(firsts, counts) + np.arange(counts.sum())

    def last_within(self, first: int, nbytes: int) -> int:
        """The end of the short runs from `first` on that have so many bytes together, or less."""
        return int(np.searchsorted(self._ends, self._begin(first) + nbytes // self._block_bytes, side="right"))

    def blocks(self, first: int, end: int) -> BlockIds:
        """Those of some of the short runs."""
        return self._blocks[self._begin(first) : self._ends[end - 1]]

    def cut(self, region: int, number: int) -> Iterator[Message]:
        """The messages of a long run."""
        start, count = self._long_runs[number]
        for first in range(start, start + count, self._message_blocks):
            blocks = np.arange(first, min(first + self._message_blocks, start + count))
            yield Message((RegionBlocks(region, blocks),), len(blocks) * self._block_bytes)

    def _begin(self, first: int) -> int:
        return int(self._ends[first - 1]) if first else 0
