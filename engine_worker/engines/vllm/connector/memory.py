"""vLLM's KV tensors as the transfer agent's memory, with staging blocks behind them. Imports torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from engine_worker.device import Accelerator
from engine_worker.engines.vllm.connector.cuda import CudaAccelerator
from engine_worker.engines.vllm.connector.staged_memory import StagedMemory
from engine_worker.engines.vllm.connector.staging import staging_ids
from engine_worker.kv.device_memory import DeviceMemory
from engine_worker.kv.layout import Region
from engine_worker.kv.memory import RegionMemory
from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class RankShape:
    """Which rank of an instance a process is, and how the KV heads are spread."""

    tensor_rank: int = 0
    tensor_ranks: int = 1
    pipeline_rank: int = 0
    pipeline_ranks: int = 1
    total_heads: int = 1
    """KV heads of a layer over all ranks."""
    has_latents: bool = False
    """Every rank has the same KV, which no head owns (multi-head latent attention)."""

    @property
    def rank(self) -> int:
        """As vLLM numbers the processes of an instance: tensor parallel ones next to each other."""
        return self.pipeline_rank * self.tensor_ranks + self.tensor_rank

    @property
    def ranks(self) -> int:
        return self.tensor_ranks * self.pipeline_ranks

    def first_head(self) -> int:
        """Where there are more ranks than heads, some have the same one."""
        return 0 if self.has_latents else self.tensor_rank * self.total_heads // self.tensor_ranks


class EngineMemory(StagedMemory):
    """vLLM's blocks, and staging blocks of the same layout."""

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        *,
        blocks: int,
        staging_blocks: int,
        model: str,
        block_tokens: int,
        shape: RankShape,
        sends_device_memory: bool,
    ) -> None:
        """`sends_device_memory`: see `DeviceMemory`. Raises `ConfigurationError` for an unknown layout."""
        tensors = [part for name, cache in kv_caches.items() for part in _parts(name, cache, blocks)]
        device = tensors[0][1].device
        self._regions = [_matrix(tensor) for _, tensor in tensors]
        self._staged = [
            torch.empty((staging_blocks, region.shape[1]), dtype=torch.uint8, device=device) for region in self._regions
        ]
        about: dict[str, Any] = {
            "model": model,
            "dtype": str(tensors[0][1].dtype),
            "block_tokens": block_tokens,
            "named": [_named(name, tensor, block_tokens, shape) for name, tensor in tensors],
            "rank": shape.rank,
            "ranks": shape.ranks,
        }
        self._accelerator: Accelerator | None = None
        engine: RegionMemory
        staging: RegionMemory
        if device.type == "cpu":
            about["isa"] = torch.backends.cpu.get_cpu_capability()
            engine, staging = (
                RegionMemory([region.numpy() for region in matrices], **about)
                for matrices in (self._regions, self._staged)
            )
        else:
            self._accelerator = CudaAccelerator(device)
            about["sends_device_memory"] = sends_device_memory
            engine, staging = (
                DeviceMemory(matrices, self._accelerator, **about) for matrices in (self._regions, self._staged)
            )
        super().__init__(engine, staging, staging_ids(blocks, staging_blocks).start)

    def fill(self, staging_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy staged blocks into vLLM's; on vLLM's own thread and stream."""
        if not block_ids:
            return
        device = self._regions[0].device
        rows = torch.tensor([staging_id - self.first_staging for staging_id in staging_ids], device=device)
        targets = torch.tensor(list(block_ids), device=device)
        for region, staged in zip(self._regions, self._staged, strict=True):
            region[targets] = staged[rows]

    def use_in_this_thread(self) -> None:
        """Called in the agent's thread before it uses the memory: it is to be on the GPU of this rank."""
        if self._accelerator is not None:
            self._accelerator.use_in_this_thread()


def _parts(name: str, cache: torch.Tensor, blocks: int) -> list[tuple[str, torch.Tensor]]:
    """A tensor whose first dimension counts blocks, or one each for keys and values where they lie apart."""
    if cache.shape[0] == blocks:
        return [(name, cache)]
    if cache.shape[0] == 2 and cache.shape[1] == blocks:
        return [(f"{name} keys", cache[0]), (f"{name} values", cache[1])]
    raise ConfigurationError(
        f"the KV cache of {name} has shape {tuple(cache.shape)} for {blocks} blocks, which is no layout that can be "
        "moved block by block: start the engine with movable=False"
    )


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8, blocks x bytes of a block. vLLM's views name the dimensions of a block in one order and
    may have them in memory in another, which is that of the bytes."""
    stored = tensor.permute(0, *_stored_order(tensor))
    if not stored[0].is_contiguous():
        raise ConfigurationError(
            f"a KV block is not in one piece (shape {tuple(tensor.shape)}, strides {tensor.stride()}): start the "
            "engine with movable=False"
        )
    return stored.view(stored.shape[0], -1).view(torch.uint8)


def _named(name: str, tensor: torch.Tensor, block_tokens: int, shape: RankShape) -> Region:
    """Which heads the blocks of a tensor hold, and in how many pieces each."""
    dimension = _head_dimension(tensor, block_tokens)
    if dimension is None:  # no heads, or one that needs no dimension
        return Region(name, shape.first_head(), 1, 1, _block_bytes(tensor))
    order = _stored_order(tensor)
    runs = prod(tensor.shape[each] for each in order[: order.index(dimension)])
    heads = tensor.shape[dimension]
    return Region(name, shape.first_head(), heads, runs, _block_bytes(tensor) // (runs * heads))


def _head_dimension(tensor: torch.Tensor, block_tokens: int) -> int | None:
    """vLLM 0.32 has blocks, heads, tokens, content; before, the tokens came before the heads."""
    if tensor.dim() != 4:
        return None
    return 1 if tensor.shape[2] == block_tokens else 2


def _stored_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions behind that of the blocks, as they lie in memory. Heads of which there is one are
    taken for where they would be if there were more."""
    return sorted(range(1, tensor.dim()), key=lambda each: (-tensor.stride(each), tensor.shape[each] == 1))


def _block_bytes(tensor: torch.Tensor) -> int:
    return int(tensor[0].numel()) * int(tensor.element_size())
