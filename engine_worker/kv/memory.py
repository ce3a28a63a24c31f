"""The KV memory of an engine, as the agent reads and writes it."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from math import prod
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from engine_worker.kv.layout import KvLayout, Region
from engine_worker.kv.plan import RegionBlocks
from engine_worker.kv.regions import Part, part_block_bytes
from mesh.errors import ConfigurationError

Buffer: TypeAlias = Any
"""Bytes in one piece: a flat uint8 NumPy array, or a flat uint8 tensor in GPU memory (`__cuda_array_interface__`)."""


class KvMemory(Protocol):
    """Blocks of bytes. All calls come from the agent's event loop, and no `gather` or `scatter` is ever cancelled."""

    @property
    def layout(self) -> KvLayout:
        """Regions, block sizes and data type. A peer with another layout cannot exchange blocks with this memory."""

    @property
    def blocks(self) -> int:
        """Number of blocks; their ids go from 0 to `blocks` - 1."""

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        """These blocks in place, if they lie in one piece; otherwise None."""

    def staging(self, nbytes: int) -> Buffer:
        """A new buffer of the kind of memory that the blocks are in."""

    async def ready(self) -> None:
        """Return once the engine has done what it had begun with its blocks when they were exported or reserved."""

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        """Copy blocks, one after another, into a staging buffer."""

    async def scatter(self, blocks: Sequence[RegionBlocks], content: Buffer) -> None:
        """Copy blocks out of a staging buffer. May raise `KvBlockCorrupt`."""

    def host_bytes(self, buffer: Buffer) -> memoryview:
        """The content of a buffer, for a checksum."""

    def part(self, parts: Sequence[Part]) -> "KvMemory":
        """The same blocks as memory of these parts only, which become its regions. Only of a layout that names its
        regions."""


class RegionMemory:
    """The `KvMemory` of blocks in arrays: of each region a matrix of uint8, blocks x bytes of a block, with any stride
    between blocks. A block of which some heads lie in several pieces is a matrix itself: pieces x bytes.

    NumPy arrays in host memory; of a torch tensor on the CPU its `.numpy()`. `DeviceMemory` is that of a GPU.
    """

    def __init__(
        self,
        regions: Sequence[Any],
        *,
        model: str,
        dtype: str,
        block_tokens: int,
        isa: str = "",
        named: Sequence[Region] = (),
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        """`named`: what the regions are, if that is known. Raises `ConfigurationError` for regions of another shape."""
        self._regions = list(regions)
        for number, region in enumerate(self._regions):
            if (
                region.ndim not in (2, 3)
                or "uint8" not in str(region.dtype)
                or region.shape[0] != self._regions[0].shape[0]
            ):
                raise ConfigurationError(
                    f"region {number} of the KV memory is {region.dtype} of shape {tuple(region.shape)}; each must "
                    "be uint8, blocks x bytes of a block, with the same number of blocks"
                )
        if not self._regions:
            raise ConfigurationError("KV memory needs at least one region")
        self.blocks = int(self._regions[0].shape[0])
        self.layout = KvLayout(
            model=model,
            dtype=dtype,
            block_tokens=block_tokens,
            region_block_bytes=tuple(prod(region.shape[1:]) for region in self._regions),
            isa=isa,
            regions=tuple(named),
            rank=rank,
            ranks=ranks,
        )
        if named and self.layout.region_block_bytes != tuple(region.block_bytes for region in named):
            raise ConfigurationError("the regions of the KV memory are not as large as their heads are together")
        self._is_dense = [self._stride_of(region) == region.shape[1] for region in self._regions]

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        if self._regions[region].ndim > 2 or (count > 1 and not self._is_dense[region]):
            return None
        return self._regions[region][first_block : first_block + count].reshape(-1)

    def staging(self, nbytes: int) -> Buffer:
        return np.empty(nbytes, np.uint8)

    async def ready(self) -> None:
        """At once: what is written to host memory is there when the call returns."""

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        for (region, ids), content in cut(blocks, self.layout.region_block_bytes, into):
            source = self._regions[region]
            target = content.reshape(-1, *source.shape[1:])
            if ids.min() < 0 or ids.max() >= self.blocks:
                raise IndexError(f"blocks {ids.min()} to {ids.max()} are asked for, and there are {self.blocks}")
            if source.flags.c_contiguous:
                # With mode="raise" NumPy would copy it all once more, into a buffer of its own.
                np.take(source, ids, axis=0, out=target, mode="clip")
            else:  # of which `take` would copy all of the memory
                target[...] = source[ids]

    async def scatter(self, blocks: Sequence[RegionBlocks], content: Buffer) -> None:
        for (region, ids), piece in cut(blocks, self.layout.region_block_bytes, content):
            target = self._regions[region]
            target[ids] = piece.reshape(-1, *target.shape[1:])

    def part(self, parts: Sequence[Part]) -> Self:
        layout, named = self.layout, self.layout.regions
        taken = copy(self)
        taken._regions = [_heads(self._regions[each.region], named[each.region], each) for each in parts]
        taken._is_dense = [self._stride_of(region) == region.shape[1] for region in taken._regions]
        taken.layout = structs.replace(
            layout,
            region_block_bytes=part_block_bytes(layout, parts),
            regions=tuple(
                structs.replace(
                    named[each.region], first_head=named[each.region].first_head + each.first_head, heads=each.heads
                )
                for each in parts
            ),
        )
        return taken

    def host_bytes(self, buffer: Buffer) -> memoryview:
        host: NDArray[np.uint8] = buffer if isinstance(buffer, np.ndarray) else buffer.cpu().numpy()
        return host.data

    @staticmethod
    def _stride_of(region: Any) -> int:
        return int(region.strides[0] if isinstance(region, np.ndarray) else region.stride(0))


class BlockBytesMemory:
    """The `KvMemory` of an engine that hands out and takes in blocks as bytes; always staged. For the simulated
    engine."""

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        read_block: Callable[[int], bytes],
        write_block: Callable[[int, bytes], None],
    ) -> None:
        """What `read_block` and `write_block` raise ends the transfer with that error."""
        if len(layout.region_block_bytes) != 1:
            raise ConfigurationError("blocks that are transferred as bytes have one region")
        self.layout = layout
        self.blocks = blocks
        self._read_block = read_block
        self._write_block = write_block

    def view(self, region: int, first_block: int, count: int) -> None:
        """Always None: the engine's blocks cannot be read or written in place."""

    def staging(self, nbytes: int) -> Buffer:
        return np.empty(nbytes, np.uint8)

    async def ready(self) -> None:
        """At once: the engine is asked block by block."""

    async def gather(self, blocks: Sequence[RegionBlocks], into: Buffer) -> None:
        for block, content in self._each(blocks, into):
            content[:] = np.frombuffer(self._read_block(block), np.uint8)

    async def scatter(self, blocks: Sequence[RegionBlocks], content: Buffer) -> None:
        for block, piece in self._each(blocks, content):
            self._write_block(block, piece.tobytes())

    def _each(self, blocks: Sequence[RegionBlocks], buffer: Buffer) -> Iterator[tuple[int, Buffer]]:
        for (_, ids), pieces in cut(blocks, self.layout.region_block_bytes, buffer):
            yield from zip(ids.tolist(), pieces.reshape(len(ids), -1), strict=True)

    def host_bytes(self, buffer: Buffer) -> memoryview:
        content: NDArray[np.uint8] = buffer
        return content.data

    def part(self, parts: Sequence[Part]) -> KvMemory:
        """Never: nobody knows which of a block's bytes are whose."""
        raise ConfigurationError("blocks that are transferred as bytes have no parts")


def _heads(region: Any, named: Region, part: Part) -> Any:
    """Some heads of each block, where they lie."""
    if part.heads == named.heads:
        return region
    first, end = part.first_head * named.head_bytes, (part.first_head + part.heads) * named.head_bytes
    if named.runs == 1:
        return region[:, first:end]
    return region.reshape(region.shape[0], named.runs, -1)[:, :, first:end]


def cut(
    blocks: Sequence[RegionBlocks], region_block_bytes: Sequence[int], buffer: Buffer
) -> Iterator[tuple[RegionBlocks, Buffer]]:
    """Blocks of each region with their part of a staging buffer."""
    offset = 0
    for each in blocks:
        end = offset + len(each.ids) * region_block_bytes[each.region]
        yield each, buffer[offset:end]
        offset = end
