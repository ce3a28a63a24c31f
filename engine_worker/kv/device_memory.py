"""KV memory of a GPU: what is copied, in which order with the engine's own work, and what is waited for.

No copy waits for the engine, nor the engine for a copy: both have streams of their own, whose order is kept by looking
at events from the agent's event loop. `torch.cuda.synchronize`, which this did at first, waits for the whole step under
way, on the thread that also keeps the peers' time.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from engine_worker.device import Accelerator, Mark
from engine_worker.kv.layout import Region
from engine_worker.kv.memory import Buffer, RegionMemory, cut
from engine_worker.kv.plan import RegionBlocks

_EAGER_LOOKS = 50
"""Looks at an event between which the event loop turns once: a message of 1 MiB is copied within a few of them."""
_LOOK_S = 1e-3
"""Between two looks after these, as when the engine's step is waited for. The loop's selector knows no shorter pause:
one of 50 us, which stood here, lasted a millisecond, and blocks left an H100 at 2 GB/s."""


class DeviceMemory(RegionMemory):
    """The `KvMemory` of blocks in matrices of uint8 in a GPU's memory.

    `mark_engine` is called in the engine's thread whenever blocks are exported or to be filled. They are read and
    written only once everything is done that the engine had begun until then: no peer reads what a step is still to
    write, and a step that had the block before never overwrites what arrives.
    """

    def __init__(
        self,
        regions: Sequence[Any],
        accelerator: Accelerator,
        *,
        sends_device_memory: bool,
        model: str,
        dtype: str,
        block_tokens: int,
        named: Sequence[Region] = (),
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`sends_device_memory`: whether the fabric takes buffers of the GPU's memory. If not, all blocks travel by way
        of page-locked host memory. Raises `ConfigurationError` for regions of another shape."""
        super().__init__(
            regions, model=model, dtype=dtype, block_tokens=block_tokens, named=named, rank=rank, ranks=ranks
        )
        self._accelerator = accelerator
        self._sends_device_memory = sends_device_memory
        self._engine_mark: Mark | None = None

    def mark_engine(self) -> None:
        """Note how far the engine has got."""
        self._engine_mark = self._accelerator.mark_engine()

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        return super().view(region, first_block, count) if self._sends_device_memory else None

    def staging(self, nbytes: int) -> Buffer:
        if self._sends_device_memory:
            return self._accelerator.device_buffer(nbytes)
        return self._accelerator.pinned_buffer(nbytes)

    async def ready(self) -> None:
        if self._engine_mark is not None:
            await _reached(self._engine_mark)

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        for (region, ids), content in cut(blocks, self.layout.region_block_bytes, into):
            self._accelerator.gather_rows(self._regions[region], ids, content)
        await _reached(self._accelerator.mark_copies())

    async def scatter(self, blocks: Sequence[RegionBlocks], content: Buffer) -> None:
        for (region, ids), piece in cut(blocks, self.layout.region_block_bytes, content):
            self._accelerator.scatter_rows(piece, ids, self._regions[region])
        await _reached(self._accelerator.mark_copies())


async def _reached(mark: Mark) -> None:
    # CUDA tells of it in a thread of its own only, which costs more.
    looks = 0
    while not mark.query():
        looks += 1
        await asyncio.sleep(0 if looks < _EAGER_LOOKS else _LOOK_S)
