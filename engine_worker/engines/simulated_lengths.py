"""The simulated engine tells how long its requests will get, which it knows, through an error model."""

from collections.abc import AsyncIterator, Callable

import numpy as np

from controlplane.model.request import EngineRequest
from controlplane.prediction.length_error import LengthErrorModel
from engine_worker.engines.predicted_lengths import PredictedLength
from engine_worker.engines.simulated_lora import SimulatedAdapters
from engine_worker.engines.simulated_media import TEXT_ONLY, SimulatedMedia
from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.engines.simulated_pace import Pace, steady
from engine_worker.host_tier.settings import NO_HOST_TIER, OF_THIS_MACHINE, HostStores, HostTierSettings
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_worker import ucx_fabric
from mesh.mailbox import Mailbox
from mesh.runtime import Clock, Entropy
from simulator.cost.model import CostModel
from simulator.instance.config import InstanceConfig
from simulator.instance.script import Script
from simulator.instance.sequence import SequenceState


class LengthPredictingSimulatedEngine(MovableSimulatedEngine):
    """A `LengthPredictingEngine`: stands in for hidden states and a predictor where there is no model, with a
    predictor's errors."""

    def __init__(
        self,
        config: InstanceConfig,
        cost: CostModel,
        clock: Clock,
        *,
        length_error: LengthErrorModel | None,
        time_scale: float = 1.0,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        tokenizer_mode: str = "",
        media: SimulatedMedia = TEXT_ONLY,
        make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric,
        kv_host: str = "127.0.0.1",
        kv_port: int = 0,
        entropy: Entropy | None = None,
        lora: SimulatedAdapters | None = None,
        host: HostTierSettings = NO_HOST_TIER,
        stores: HostStores = OF_THIS_MACHINE,
        pace: Pace = steady,
    ) -> None:
        """`length_error` spoils the true lengths as a predictor would; None: the engine predicts nothing."""
        super().__init__(
            config,
            cost,
            clock,
            time_scale=time_scale,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            tokenizer_mode=tokenizer_mode,
            media=media,
            make_fabric=make_fabric,
            kv_host=kv_host,
            kv_port=kv_port,
            entropy=entropy,
            lora=lora,
            host=host,
            stores=stores,
            pace=pace,
        )
        self._length_error = length_error
        self._every_steps = 0
        self._steps = 0
        self._total_tokens: dict[str, int] = {}
        self._predictions: Mailbox[tuple[PredictedLength, ...]] = Mailbox()

    def enable_length_predictions(self, every_steps: int) -> bool:
        self._every_steps = every_steps if self._length_error is not None else 0
        return self._length_error is not None

    def length_predictions(self) -> AsyncIterator[tuple[PredictedLength, ...]]:
        return self._predictions.read()

    def submit(self, request: EngineRequest) -> None:
        super().submit(request)
        self._note(request)

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        await super().reserve(migration_id, request)
        self._note(request)

    async def stop(self) -> None:
        await super().stop()
        self._predictions.close()

    def _after_step(self) -> None:
        super()._after_step()
        if not self._every_steps:
            return
        self._steps += 1
        if self._steps % self._every_steps == 0:
            self._predictions.replace_all(self._predict(self._length_error or LengthErrorModel(sigma=0.0)))

    def _note(self, request: EngineRequest) -> None:
        if self._length_error is None:
            return
        config = self.instance.config
        prompt = np.asarray(request.prompt_token_ids, dtype=np.uint32)
        script = Script(
            prompt,
            request.emitted_token_ids,
            request.sampling,
            config.max_model_len_tokens,
            config.output,
            request.media_spans,
            request.adapter_digest,
        )
        self._total_tokens[request.request_id] = script.total_tokens

    def _predict(self, error: LengthErrorModel) -> tuple[PredictedLength, ...]:
        predicted: list[PredictedLength] = []
        for request_id, total_tokens in list(self._total_tokens.items()):
            state = self.instance.state_of(request_id)
            if state is SequenceState.ENDED and request_id not in self._request_ids:
                del self._total_tokens[request_id]
            elif state is SequenceState.DECODE:
                generated = self.instance.generated_tokens(request_id)
                remaining = error.predict(request_id, generated, total_tokens - generated)
                predicted.append(PredictedLength(request_id, generated, remaining))
        return tuple(predicted)
