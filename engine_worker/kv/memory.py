"""The KV memory of an engine, as the agent reads and writes it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_worker.kv.layout import KvLayout
from mesh.errors import ConfigurationError

Buffer: TypeAlias = Any
"""Bytes in one piece: a flat uint8 NumPy array, or a flat uint8 tensor in GPU memory (`__cuda_array_interface__`)."""


class KvMemory(Protocol):
    """Blocks of bytes. All calls come from the agent's event loop."""

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

    def read(self, region: int, first_block: int, count: int, into: Buffer) -> None:
        """Copy blocks into a staging buffer."""

    def write(self, region: int, first_block: int, count: int, content: Buffer) -> None:
        """Copy blocks out of a staging buffer. May raise `KvBlockCorrupt`."""

    def settle(self) -> None:
        """Wait until the copies begun so far are done."""

    def host_bytes(self, buffer: Buffer) -> memoryview:
        """The content of a buffer, for a checksum."""


class RegionMemory:
    """The `KvMemory` of blocks in arrays: of each region a matrix of uint8, blocks x bytes of a block, with any stride
    between blocks.

    NumPy arrays for host memory (of a torch tensor on the CPU its `.numpy()`), anything with the CUDA array interface
    for a GPU's.
    """

    def __init__(
        self,
        regions: Sequence[Any],
        *,
        model: str,
        dtype: str,
        block_tokens: int,
        isa: str = "",
        new_staging: Callable[[int], Buffer] | None = None,
        settle: Callable[[], None] | None = None,
    ) -> None:
        """On a GPU, `new_staging` is `lambda n: torch.empty(n, dtype=torch.uint8, device=...)` and `settle` is
        `torch.cuda.current_stream(...).synchronize`. Raises `ConfigurationError` for regions of another shape."""
        self._regions = list(regions)
        for number, region in enumerate(self._regions):
            if region.ndim != 2 or "uint8" not in str(region.dtype) or region.shape[0] != self._regions[0].shape[0]:
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
            region_block_bytes=tuple(int(region.shape[1]) for region in self._regions),
            isa=isa,
        )
        self._is_dense = [self._stride_of(region) == region.shape[1] for region in self._regions]
        self._new_staging = new_staging
        self._settle = settle

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        if count > 1 and not self._is_dense[region]:
            return None
        return self._regions[region][first_block : first_block + count].reshape(-1)

    def staging(self, nbytes: int) -> Buffer:
        return self._new_staging(nbytes) if self._new_staging else np.empty(nbytes, np.uint8)

    def read(self, region: int, first_block: int, count: int, into: Buffer) -> None:
        into.reshape(count, -1)[:] = self._regions[region][first_block : first_block + count]

    def write(self, region: int, first_block: int, count: int, content: Buffer) -> None:
        self._regions[region][first_block : first_block + count] = content.reshape(count, -1)

    def settle(self) -> None:
        if self._settle is not None:
            self._settle()

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

    def read(self, region: int, first_block: int, count: int, into: Buffer) -> None:
        rows = into.reshape(count, -1)
        for index in range(count):
            rows[index] = np.frombuffer(self._read_block(first_block + index), np.uint8)

    def write(self, region: int, first_block: int, count: int, content: Buffer) -> None:
        for index, row in enumerate(content.reshape(count, -1)):
            self._write_block(first_block + index, row.tobytes())

    def settle(self) -> None:
        """Copies are done when the calls return."""

    def host_bytes(self, buffer: Buffer) -> memoryview:
        content: NDArray[np.uint8] = buffer
        return content.data
