"""A simulated pooling model: the time of a real one, and vectors that follow from the tokens alone."""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.model.pooling import PoolingTask
from controlplane.model.request import EngineRequest, SamplingParams, TokenDelta
from engine_worker.engines.pooling import PoolingParameters
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.simulated_pace import Pace, steady
from engine_worker.engines.simulated_vectors import pooled
from mesh.errors import EngineFailed, RequestRefused
from mesh.runtime import Clock
from simulator.cost.model import CostModel
from simulator.instance.config import InstanceConfig


class PoolingSimulatedEngine(SimulatedEngine):
    """A `PoolingEngine`. A prompt takes the steps of its prefill and one more; its requests do not move."""

    def __init__(
        self,
        config: InstanceConfig,
        cost: CostModel,
        clock: Clock,
        *,
        time_scale: float,
        pace: Pace = steady,
        tensor_parallel: int,
        pipeline_parallel: int,
        dimensions: int,
    ) -> None:
        """`dimensions`: of its vectors."""
        super().__init__(
            config,
            cost,
            clock,
            time_scale=time_scale,
            pace=pace,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
        )
        self._dimensions = dimensions
        self._computed: dict[str, asyncio.Future[None]] = {}
        """Prompts in the instance, by id; done after the step that computes them."""

    @property
    def pooling_tasks(self) -> tuple[PoolingTask, ...]:
        return ("embed", "classify", "token_embed")

    @property
    def has_separator(self) -> bool:
        return True

    def submit(self, request: EngineRequest) -> None:
        """Raises RequestRefused."""
        raise RequestRefused("this engine serves a pooling model, which answers nothing; ask for embeddings")

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        if parameters.task not in self.pooling_tasks:
            raise RequestRefused(f"this model does not {parameters.task}; it does {', '.join(self.pooling_tasks)}")
        if (parameters.dimensions or 0) > self._dimensions:
            raise RequestRefused(f"vectors of this model have {self._dimensions} dimensions")
        if self._failure is not None:
            raise self._failure
        sampling = SamplingParams(max_tokens=1, ignore_eos=True)
        salt = parameters.cache_salt
        self.instance.submit(EngineRequest(request_id, tuple(token_ids), sampling, priority=priority, cache_salt=salt))
        computed = self._computed[request_id] = asyncio.get_running_loop().create_future()
        self.wake()
        try:
            await computed
        finally:
            del self._computed[request_id]
            self.instance.abort(request_id)
        return pooled(token_ids, parameters, self._dimensions)

    async def stop(self) -> None:
        await super().stop()
        self._fail_all(EngineFailed("the engine was stopped"))

    def _answered(self, deltas: tuple[TokenDelta, ...]) -> tuple[TokenDelta, ...]:
        for delta in deltas:
            computed = self._computed.get(delta.request_id)
            if computed is not None and not computed.done():
                computed.set_result(None)
        return ()

    async def _run(self) -> None:
        await super()._run()
        if self._failure is not None:
            self._fail_all(self._failure)

    def _fail_all(self, failure: EngineFailed) -> None:
        for computed in self._computed.values():
            if not computed.done():
                computed.set_exception(failure)
