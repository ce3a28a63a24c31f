"""The engine's KV blocks and staging blocks behind them, as one memory. Without torch."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import groupby
from typing import Self

import numpy as np

from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import Buffer, RegionMemory
from engine_worker.kv.plan import BlockIds, RegionBlocks
from engine_worker.kv.regions import Part


class StagedMemory:
    """Implements `KvMemory`. Blocks 0 to `engine_blocks` - 1 are the engine's; staging blocks begin at `first_staging`
    (see `staging_ids`)."""

    def __init__(self, engine: RegionMemory, staging: RegionMemory, first_staging: int) -> None:
        self.engine_blocks = engine.blocks
        self.first_staging = first_staging
        self.blocks = first_staging + staging.blocks
        self._engine = engine
        self._staging = staging

    @property
    def layout(self) -> KvLayout:
        return self._engine.layout

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        memory, first = self._of(first_block)
        return memory.view(region, first, count)

    def staging(self, nbytes: int) -> Buffer:
        return self._engine.staging(nbytes)

    def mark_engine(self) -> None:
        """Called in vLLM's thread before blocks are exported or filled: what it has begun so far goes first."""
        if isinstance(self._engine, DeviceMemory):
            self._engine.mark_engine()

    async def ready(self) -> None:
        await self._engine.ready()

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        for memory, part, begin, end in self._parts_of(blocks):
            await memory.gather(part, into[begin:end])

    async def scatter(self, blocks: Sequence[RegionBlocks], content: Buffer) -> None:
        for memory, part, begin, end in self._parts_of(blocks):
            await memory.scatter(part, content[begin:end])

    def host_bytes(self, buffer: Buffer) -> memoryview:
        return self._engine.host_bytes(buffer)

    def part(self, parts: Sequence[Part]) -> Self:
        taken = copy(self)
        taken._engine, taken._staging = self._engine.part(parts), self._staging.part(parts)
        return taken

    def _parts_of(self, blocks: Sequence[RegionBlocks]) -> Iterator[tuple[RegionMemory, list[RegionBlocks], int, int]]:
        """Blocks of the one memory or the other that follow each other, and where they are in a buffer."""
        offset = 0
        pieces = [RegionBlocks(each.region, ids) for each in blocks for ids in self._split(each.ids)]
        for is_staged, theirs in groupby(pieces, lambda each: bool(each.ids[0] >= self.first_staging)):
            memory, first = (self._staging, self.first_staging) if is_staged else (self._engine, 0)
            part = [RegionBlocks(each.region, each.ids - first) for each in theirs]
            end = offset + sum(len(each.ids) * self.layout.region_block_bytes[each.region] for each in part)
            yield memory, part, offset, end
            offset = end

    def _split(self, ids: BlockIds) -> list[BlockIds]:
        """In pieces of one memory each."""
        is_staged = ids >= self.first_staging
        return np.split(ids, np.flatnonzero(is_staged[1:] != is_staged[:-1]) + 1)

    def _of(self, block: int) -> tuple[RegionMemory, int]:
        if block >= self.first_staging:
            return self._staging, block - self.first_staging
        return self._engine, block
