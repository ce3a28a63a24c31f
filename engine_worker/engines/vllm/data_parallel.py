"""A vLLM with data parallelism: an engine for each of its cores, and those as one."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.model.media_facts import MediaFacts
from controlplane.model.pooling import PoolingTask
from controlplane.model.step_sample import StepSample
from engine_worker.adapters import AdapterCache
from engine_worker.engines.data_parallel import DataParallelEngine
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.pooling import PoolingParameters
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.processes import VllmProcesses
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.text_files import TextFiles


class DataParallelVllm(DataParallelEngine):
    """Implements besides what `VllmEngine` does. What is of no core (adapters, images, hidden states, which all cores
    send to one place) is the first one's."""

    def __init__(self, settings: VllmSettings, clock: Callable[[], float] = monotonic) -> None:
        processes = VllmProcesses(settings, clock)
        engines = [VllmEngine(settings, clock, processes, rank) for rank in range(settings.data_parallel_size)]
        super().__init__(engines)
        self._engines = engines
        self._first = engines[0]
        self.lora_modules = self._first.lora_modules
        self.load_adapter, self.unload_adapter = self._first.load_adapter, self._first.unload_adapter

    @property
    def adapters(self) -> AdapterCache:
        """See `LoraEngine`."""
        return self._first.adapters

    @property
    def media(self) -> Mapping[str, MediaFacts]:
        """See `MediaEngine`."""
        return self._first.media

    def text_files(self, checkpoint: TextFiles) -> TextFiles:
        """See `TextEngine`."""
        return self._first.text_files(checkpoint)

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """See `MediaEngine`."""
        return await self._first.expand(media)

    @property
    def pooling_tasks(self) -> tuple[PoolingTask, ...]:
        """See `PoolingEngine`."""
        return self._first.pooling_tasks

    @property
    def has_separator(self) -> bool:
        """See `PoolingEngine`."""
        return self._first.has_separator

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """See `PoolingEngine`. vLLM chooses the core: for this it can be told none (0.32)."""
        return await self._first.pool(request_id, token_ids, parameters, priority)

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """See `StepSource`: the steps of all cores."""
        for engine in self._engines:
            engine.watch_steps(observe)

    async def capture_hidden_states(self, every_steps: int) -> str:
        """See `HiddenStateSource`."""
        return await self._first.capture_hidden_states(every_steps)

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """See `HiddenStateSource`."""
        async for states in self._first.hidden_states():
            yield states


def vllm_engine(settings: VllmSettings) -> VllmEngine | DataParallelVllm:
    """The engine of these settings. Raises `ConfigurationError`."""
    return VllmEngine(settings) if settings.data_parallel_size == 1 else DataParallelVllm(settings)
