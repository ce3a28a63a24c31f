"""CUDA as KV copies see it, by torch."""

from typing import Any

import numpy as np
import torch

from engine_worker.kv.plan import BlockIds


class CudaAccelerator:
    """Implements `Accelerator` for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def use_in_this_thread(self) -> None:
        # A new thread has GPU 0, whichever rank it belongs to, and UCX takes the thread's context.
        torch.cuda.set_device(self._device)
        self._stream = torch.cuda.Stream(self._device)

    def mark_engine(self) -> Any:
        return self._marked(torch.cuda.current_stream(self._device))

    def mark_copies(self) -> Any:
        return self._marked(self._stream)

    def device_buffer(self, nbytes: int) -> Any:
        # Of the copies' own stream: torch hands out at once what the engine's stream has freed, because whatever comes
        # there next waits for the step that still reads it. A copy would not.
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def pinned_buffer(self, nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def gather_rows(self, source: Any, rows: BlockIds, into: Any) -> None:
        with torch.cuda.stream(self._stream):
            buffer = _tensor(into).view(len(rows), *source.shape[1:])
            if buffer.is_cuda:
                torch.index_select(source, 0, self._index(rows), out=buffer)
            else:
                buffer.copy_(source.index_select(0, self._index(rows)), non_blocking=True)

    def scatter_rows(self, content: Any, rows: BlockIds, target: Any) -> None:
        with torch.cuda.stream(self._stream):
            buffer = _tensor(content).view(len(rows), *target.shape[1:]).to(self._device, non_blocking=True)
            target.index_copy_(0, self._index(rows), buffer)

    def _index(self, rows: BlockIds) -> torch.Tensor:
        # From memory that is not page-locked, the copy would wait for the stream.
        return torch.from_numpy(rows).pin_memory().to(self._device, non_blocking=True)

    @staticmethod
    def _marked(stream: Any) -> Any:
        event = torch.cuda.Event()
        event.record(stream)
        return event


def _tensor(buffer: Any) -> torch.Tensor:
    return torch.from_numpy(buffer) if isinstance(buffer, np.ndarray) else buffer
