"""vLLM's AsyncLLM: started, asked and shut down. With `arguments` and `step_stats`, the only module that imports vLLM,
so it must not be imported before the environment is set (see `environment`)."""

import multiprocessing
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMClientError, VLLMError, VLLMServerError
from vllm.inputs import tokens_input
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.pooling import PoolingParameters
from engine_worker.engines.vllm.arguments import KvEndpoints, engine_arguments
from engine_worker.engines.vllm.connector.grammar import replay_obstacle, tokens_behind_reasoning
from engine_worker.engines.vllm.deltas import Completion, PromptLogprobs
from engine_worker.engines.vllm.environment import Device
from engine_worker.engines.vllm.load import StepStats
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.engines.vllm.step_stats import step_logger_class
from mesh.errors import EngineFailed, RequestRefused

_REAP_S = 1.0
_CAPTURE_TIMEOUT_S = 10.0


class Core:
    """One AsyncLLM and its core process."""

    def __init__(
        self,
        settings: VllmSettings,
        device: Device,
        endpoints: KvEndpoints,
        on_step: Callable[[StepStats], None],
    ) -> None:
        """Loads the model, which takes seconds to minutes. Raises EngineFailed, and ConfigurationError for arguments
        that vLLM's parser does not take."""
        others = multiprocessing.active_children()
        try:
            self._llm = AsyncLLM.from_engine_args(
                engine_arguments(settings, device, endpoints), stat_loggers=[step_logger_class(on_step)]
            )
        except (RuntimeError, ValueError, OSError, VLLMError) as error:
            raise EngineFailed(
                f"vLLM could not start {settings.model_path}: {error} (its own log above says more)"
            ) from error
        self._processes = [child for child in multiprocessing.active_children() if child not in others]

    def limits(self) -> EngineLimits:
        """The engine's limits as vLLM settled them at start, from its settings and the memory it found."""
        config = self._llm.vllm_config
        return EngineLimits(
            block_tokens=config.cache_config.block_size,
            # One block is vLLM's placeholder and never holds anything.
            kv_blocks=max(0, (config.cache_config.num_gpu_blocks or 1) - 1),
            max_model_len_tokens=config.model_config.max_model_len,
            max_batch_requests=config.scheduler_config.max_num_seqs,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            pipeline_parallel=config.parallel_config.pipeline_parallel_size,
        )

    async def tasks(self) -> tuple[str, ...]:
        """What the model can do, by vLLM's names."""
        return tuple(str(task) for task in await self._llm.get_supported_tasks())

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """See `PoolingEngine.pool`."""
        try:
            asked = PoolingParams(
                task=parameters.task, dimensions=parameters.dimensions, use_activation=parameters.use_activation
            )
            data: NDArray[np.float32] | None = None
            async for output in self._llm.encode(tokens_input(list(token_ids)), asked, request_id, priority=priority):
                data = output.outputs.data.float().cpu().numpy()
        except VLLMServerError as error:
            raise EngineFailed(f"vLLM failed: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error
        if data is None:
            raise EngineFailed("vLLM pooled nothing")
        return data

    def sampling_params(self, arguments: dict[str, Any]) -> SamplingParams:
        """Raises RequestRefused if vLLM does not accept the arguments."""
        structure = arguments.get("structured_outputs")
        try:
            if structure is not None:
                arguments = {**arguments, "structured_outputs": StructuredOutputsParams(**structure)}
            params = SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
            if structure is not None:  # later it would end as a failure of the engine
                self._verify(params)
        except (TypeError, ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error
        return params

    def replay_obstacle(self) -> str | None:
        """Why a request under a grammar cannot go on here after tokens that were emitted elsewhere; None if it can."""
        if self._llm.vllm_config.kv_transfer_config is None:
            return "requests of this engine cannot move"
        return replay_obstacle()

    def grammar_tokens(self, prompt_token_ids: Sequence[int], emitted_token_ids: Sequence[int]) -> int:
        """How many of the emitted tokens, at their end, the grammar has seen: all but those of the reasoning before."""
        parser = self._llm.vllm_config.structured_outputs_config.reasoning_parser
        if not parser:
            return len(emitted_token_ids)
        reasoner = ReasoningParserManager.get_reasoning_parser(parser)(self._llm.get_tokenizer())
        return tokens_behind_reasoning(reasoner.is_reasoning_end, prompt_token_ids, emitted_token_ids)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        cache_salt: str = "",
        traceparent: str = "",
    ) -> AsyncIterator[tuple[Completion, int | None, PromptLogprobs]]:
        """What each step adds, with the number of tokens found in the prefix cache where it is known, and the prompt's
        logprobs where they were asked for. Once an earlier request was served, the request is known to vLLM as soon as
        the iteration is first awaited.

        Raises RequestRefused if vLLM does not take the request and EngineFailed if it cannot go on.
        """
        prompt = tokens_input(list(token_ids), cache_salt=cache_salt or None)
        try:
            # Spans of its own, where it is started with otlp_traces_endpoint.
            headers = {"traceparent": traceparent} if traceparent else None
            outputs = self._llm.generate(prompt, params, request_id, priority=priority, trace_headers=headers)
            async for output in outputs:
                yield output.outputs[0], output.num_cached_tokens, output.prompt_logprobs or ()
        except VLLMServerError as error:
            raise EngineFailed(f"vLLM failed: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error

    async def take_out(self, internal_id: str) -> None:
        """Abort in the engine core only: what it has generated before still arrives, and then nothing more.
        `internal_id` is vLLM's own id of the request."""
        await self._llm.engine_core.abort_requests_async([internal_id])

    def _verify(self, params: SamplingParams) -> None:
        config = self._llm.vllm_config
        params.verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, self._llm.tokenizer
        )

    async def capture_hidden_states(self, endpoint: str, every_steps: int) -> str:
        """See `HiddenStateExtension.penstock_capture`; the first reason of several workers. Raises EngineFailed."""
        try:
            reasons = await self._llm.collective_rpc(
                "penstock_capture", timeout=_CAPTURE_TIMEOUT_S, args=(endpoint, every_steps)
            )
        # What vLLM raises for a call that failed has no type of its own.
        except Exception as error:
            raise EngineFailed(f"vLLM could not be asked for hidden states: {error!r}") from error
        return next((str(reason) for reason in reasons if reason), "")

    async def abort(self, request_id: str) -> None:
        """End a request; its iteration ends with finish reason abort."""
        await self._llm.abort(request_id)

    @property
    def is_dead(self) -> bool:
        """Whether the core process has died."""
        return bool(self._llm.errored)

    def stop_reading(self) -> None:
        """Take nothing more from the core process; on the event loop, before `shutdown`. Otherwise vLLM reports
        the shutdown as the engine's death."""
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()

    def shutdown(self, timeout_s: float) -> None:
        """End the core process; blocks for up to that long, then kills it."""
        self._llm.shutdown(timeout=timeout_s)
        for process in self._processes:
            # vLLM leaves those that it had to kill as zombies.
            process.join(_REAP_S)
