"""vLLM's KV tensors as the transfer agent's memory, with staging blocks behind them. Imports torch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from engine_worker.kv.layout import KvLayout
from engine_worker.kv.memory import Buffer, RegionMemory
from mesh.errors import ConfigurationError


class EngineMemory:
    """Implements `KvMemory`. Blocks 0 to `engine_blocks` - 1 are vLLM's; staging blocks begin at `first_staging`.

    One id between the two belongs to nobody, so that no run of consecutive ids spans both.
    """

    def __init__(
        self, kv_caches: Mapping[str, torch.Tensor], *, blocks: int, staging_blocks: int, model: str, block_tokens: int
    ) -> None:
        """Raises `ConfigurationError` where the tensors are laid out in a way that is not known here."""
        tensors = [part for name, cache in kv_caches.items() for part in _parts(name, cache, blocks)]
        on_cpu = tensors[0].device.type == "cpu"
        regions = [_matrix(tensor) for tensor in tensors]
        staging = [
            torch.empty((staging_blocks, region.shape[1]), dtype=torch.uint8, device=region.device)
            for region in regions
        ]
        about: dict[str, Any] = {
            "model": model,
            "dtype": str(tensors[0].dtype),
            "block_tokens": block_tokens,
            "isa": torch.backends.cpu.get_cpu_capability() if on_cpu else "",
            "new_staging": None if on_cpu else _new_buffer(tensors[0].device),
            "settle": None if on_cpu else torch.cuda.synchronize,
        }
        self.engine_blocks = blocks
        self.first_staging = blocks + 1
        self.blocks = self.first_staging + staging_blocks
        self._regions, self._staged = regions, staging
        self._engine = RegionMemory([_array(region, on_cpu) for region in regions], **about)
        self._staging = RegionMemory([_array(region, on_cpu) for region in staging], **about)

    @property
    def layout(self) -> KvLayout:
        return self._engine.layout

    def fill(self, staging_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy staged blocks into vLLM's; on vLLM's own thread and stream."""
        if not block_ids:
            return
        device = self._regions[0].device
        rows = torch.tensor([staging_id - self.first_staging for staging_id in staging_ids], device=device)
        targets = torch.tensor(list(block_ids), device=device)
        for region, staged in zip(self._regions, self._staged, strict=True):
            region[targets] = staged[rows]

    def view(self, region: int, first_block: int, count: int) -> Buffer | None:
        memory, first = self._of(first_block)
        return memory.view(region, first, count)

    def staging(self, nbytes: int) -> Buffer:
        return self._engine.staging(nbytes)

    def read(self, region: int, first_block: int, count: int, into: Buffer) -> None:
        memory, first = self._of(first_block)
        memory.read(region, first, count, into)

    def write(self, region: int, first_block: int, count: int, content: Buffer) -> None:
        memory, first = self._of(first_block)
        memory.write(region, first, count, content)

    def settle(self) -> None:
        self._engine.settle()

    def host_bytes(self, buffer: Buffer) -> memoryview:
        return self._engine.host_bytes(buffer)

    def _of(self, block: int) -> tuple[RegionMemory, int]:
        if block >= self.first_staging:
            return self._staging, block - self.first_staging
        return self._engine, block


def _parts(name: str, cache: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """A tensor whose first dimension counts blocks, or one each for keys and values where they lie apart."""
    if cache.shape[0] == blocks:
        return [cache]
    if cache.shape[0] == 2 and cache.shape[1] == blocks:
        return [cache[0], cache[1]]
    raise ConfigurationError(
        f"the KV cache of {name} has shape {tuple(cache.shape)} for {blocks} blocks, which is no layout that can be "
        "moved block by block: start the engine with movable=False"
    )


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, blocks x bytes of a block."""
    if not tensor[0].is_contiguous():
        raise ConfigurationError(
            f"a KV block is not in one piece (shape {tuple(tensor.shape)}, strides {tensor.stride()}): start the "
            "engine with movable=False"
        )
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def _array(region: torch.Tensor, on_cpu: bool) -> Any:
    return region.numpy() if on_cpu else region


def _new_buffer(device: torch.device) -> Any:
    return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=device)
