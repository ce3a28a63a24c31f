"""vLLM's AsyncLLM: started, asked and shut down. With `arguments` and `step_stats`, the only module that imports vLLM,
so it must not be imported before the environment is set (see `environment`)."""

import multiprocessing
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from vllm import PoolingParams, SamplingParams
from vllm.exceptions import VLLMClientError, VLLMError, VLLMServerError
from vllm.inputs import EngineInput, tokens_input
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM

from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.model.media_facts import MediaFacts
from controlplane.model.pooling import PoolingTask
from controlplane.model.request import EngineRequest
from engine_worker.adapters import NumberedAdapter
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.pooling import PoolingParameters, known_tasks
from engine_worker.engines.text import MISTRAL_MODE
from engine_worker.engines.vllm.arguments import SPARE_LORAS, KvEndpoints, engine_arguments
from engine_worker.engines.vllm.carriers import WITHOUT_ANSWER, kv_parameters
from engine_worker.engines.vllm.connector.grammar import ends_by_content, replay_obstacle, tokens_behind_reasoning
from engine_worker.engines.vllm.deltas import Completion, PromptLogprobs
from engine_worker.engines.vllm.environment import Device
from engine_worker.engines.vllm.load import StepStats
from engine_worker.engines.vllm.media import MediaProcessor, media_facts
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.engines.vllm.step_stats import step_logger_class
from engine_worker.engines.vllm.tokenizer_files import is_mistral, made_text_files
from mesh.errors import AdapterUnavailable, ConfigurationError, EngineFailed, RequestRefused
from mesh.text_files import TextFiles

_REAP_S = 1.0
_CALL_TIMEOUT_S = 10.0
_WARM_UP_TOKENS = 2


class Core:
    """One AsyncLLM and its core process."""

    def __init__(
        self,
        settings: VllmSettings,
        device: Device,
        endpoints: KvEndpoints,
        on_step: Callable[[int, StepStats], None],
    ) -> None:
        """Loads the model, which takes seconds to minutes. `on_step` is told the number of the engine core, too. Raises
        EngineFailed, and ConfigurationError for arguments that vLLM's parser does not take."""
        self._spare_loras = SPARE_LORAS if device == "cpu" else 0
        others = multiprocessing.active_children()
        try:
            self._llm = AsyncLLM.from_engine_args(
                engine_arguments(settings, device, endpoints), stat_loggers=[step_logger_class(on_step)]
            )
        except (RuntimeError, ValueError, OSError, VLLMError) as error:
            raise EngineFailed(
                f"vLLM could not start {settings.model_path}: {error} (its own log above says more)"
            ) from error
        self._media_processor: MediaProcessor | None = None
        self._data_parallel = settings.data_parallel_size
        self._rank: int | None = None
        """The core that requests are for; None where there is one."""
        self._processes = [child for child in multiprocessing.active_children() if child not in others]

    def of_rank(self, data_parallel_rank: int) -> Self:
        """The same, for requests of one of its cores."""
        core = copy(self)
        core._rank = data_parallel_rank if self._data_parallel > 1 else None
        return core

    def limits(self) -> EngineLimits:
        """A core's limits as vLLM settled them at start, from its settings and the memory it found."""
        config = self._llm.vllm_config
        return EngineLimits(
            block_tokens=config.cache_config.block_size,
            # vLLM has the sum of all cores here. One block of each is its placeholder and never holds anything.
            kv_blocks=max(0, (config.cache_config.num_gpu_blocks or 1) // self._data_parallel - 1),
            max_model_len_tokens=config.model_config.max_model_len,
            max_batch_requests=config.scheduler_config.max_num_seqs,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            pipeline_parallel=config.parallel_config.pipeline_parallel_size,
            max_loras=self.lora_limits()[0],
            tokenizer_mode=MISTRAL_MODE
            if is_mistral(self._llm.renderer.tokenizer)
            else config.model_config.tokenizer_mode,
        )

    @property
    def mixes_logprobs(self) -> bool:
        """Whether its batches give all their requests the logprobs of tokens that one of them names."""
        return not self._llm.vllm_config.use_v2_model_runner

    def lora_limits(self) -> tuple[int, int]:
        """How many LoRA adapters one step serves, and how many may be loaded; 0 where there are to be none."""
        config, spare = self._llm.vllm_config.lora_config, self._spare_loras
        if config is None:
            return 0, 0
        return config.max_loras - spare, (config.max_cpu_loras or config.max_loras) - spare

    async def add_lora(self, adapter: NumberedAdapter) -> None:
        """Raises AdapterUnavailable with what vLLM says."""
        try:
            await self._llm.add_lora(_lora_request(adapter))
        # What vLLM raises for a call in the engine core that failed has no type of its own.
        except Exception as error:
            if self.is_dead:
                raise EngineFailed(f"vLLM died of a LoRA adapter: {error}") from error
            raise AdapterUnavailable(f"vLLM cannot load the LoRA adapter at {adapter[0].path}: {error}") from error

    async def remove_lora(self, number: int) -> None:
        """Of an adapter that no request uses."""
        await self._llm.remove_lora(number)

    async def pooling(self) -> tuple[tuple[PoolingTask, ...], bool]:
        """What a pooling model can do, first what it is for; and whether it takes pairs with a separator. Raises
        ConfigurationError where it is to be for something that it cannot do."""
        config, supported = self._llm.vllm_config.model_config, await self._llm.get_supported_tasks()
        try:
            task = config.get_pooling_task(supported)
        except RuntimeError as error:
            raise ConfigurationError(f"pooler_config.task: {error}") from error
        return known_tasks(supported, task), bool(config.use_sep_token)

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """See `PoolingEngine.pool`."""
        try:
            asked = PoolingParams(
                task=parameters.task, dimensions=parameters.dimensions, use_activation=parameters.use_activation
            )
            data: NDArray[np.float32] | None = None
            if parameters.first_segment_tokens is not None:
                asked.extra_kwargs = {"compressed_token_type_ids": parameters.first_segment_tokens}
            prompt = tokens_input(list(token_ids), cache_salt=parameters.cache_salt or None)
            outputs = self._llm.encode(prompt, asked, request_id, priority=priority)
            async for output in outputs:
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

    def text_files(self, checkpoint: TextFiles) -> TextFiles:
        """See `TextEngine.text_files`."""
        tokenizer = self._llm.renderer.tokenizer
        return {} if tokenizer is None else made_text_files(tokenizer, checkpoint)

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """See `MediaEngine.expand`."""
        with _reading_media():
            return await self._processor().expand(media)

    async def prompt(
        self, token_ids: Sequence[int], cache_salt: str = "", media: PromptMedia | None = None
    ) -> EngineInput:
        """What `generate` takes of these tokens, among them those of `media`; at once where there are none. Raises
        RequestRefused."""
        if media is None:
            return tokens_input(list(token_ids), cache_salt=cache_salt or None)
        with _reading_media():
            return await self._processor().engine_input(media, token_ids, cache_salt)

    def media(self) -> dict[str, MediaFacts]:
        """See `MediaEngine.media`."""
        return media_facts(self._llm)

    def _processor(self) -> MediaProcessor:
        if self._media_processor is None:
            self._media_processor = MediaProcessor(self._llm)
        return self._media_processor

    def replay_obstacle(self, *, is_movable: bool) -> str | None:
        """Why a request under a grammar cannot go on here after tokens that were emitted elsewhere; None if it can."""
        if not is_movable:
            return "requests of this engine cannot move"
        return replay_obstacle()

    def grammar_tokens(self, prompt_token_ids: Sequence[int], emitted_token_ids: Sequence[int]) -> int:
        """How many of the emitted tokens, at their end, the grammar has seen: all but those of the reasoning before."""
        config = self._llm.vllm_config.structured_outputs_config
        if not config.reasoning_parser or config.enable_in_reasoning:
            return len(emitted_token_ids)
        reasoner = ReasoningParserManager.get_reasoning_parser(config.reasoning_parser)(self._llm.get_tokenizer())
        return tokens_behind_reasoning(
            reasoner.is_reasoning_end, prompt_token_ids, emitted_token_ids, ends_by_content(reasoner)
        )

    async def generate(
        self,
        request_id: str,
        prompt: EngineInput,
        params: SamplingParams,
        priority: int,
        traceparent: str = "",
        adapter: NumberedAdapter | None = None,
    ) -> AsyncIterator[tuple[Completion, int | None, PromptLogprobs, float | None]]:
        """What each step adds, with the number of tokens found in the prefix cache where it is known, and the prompt's
        logprobs where they were asked for, and for how many milliseconds the request waited in vLLM's queue; `prompt`
        is what the method of this name made. Once an earlier request was served, the request is known to vLLM as soon
        as the iteration is first awaited.

        Raises RequestRefused if vLLM does not take the request and EngineFailed if it cannot go on.
        """
        try:
            # Spans of its own, where it is started with otlp_traces_endpoint.
            headers = {"traceparent": traceparent} if traceparent else None
            lora = None if adapter is None else _lora_request(adapter)
            outputs = self._llm.generate(
                prompt,
                params,
                request_id,
                lora_request=lora,
                priority=priority,
                trace_headers=headers,
                data_parallel_rank=self._rank,
            )
            async for output in outputs:
                completion, logprobs = output.outputs[0], output.prompt_logprobs or ()
                yield completion, output.num_cached_tokens, logprobs, _queued_ms(output.metrics)
        except VLLMServerError as error:
            raise EngineFailed(f"vLLM failed: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error

    async def warm_up(self, pooling_tasks: Sequence[PoolingTask]) -> None:
        """The first step imports and allocates for seconds; better now than on somebody's request. Too short to leave a
        block in the cache."""
        if self._llm.vllm_config.parallel_config.pipeline_parallel_size > 1:
            await self._llm.collective_rpc("penstock_make_receive_buffers", timeout=_CALL_TIMEOUT_S)
        if pooling_tasks:
            await self.pool("warm-up", [0], PoolingParameters(pooling_tasks[0]), priority=0)
            return
        params = self.sampling_params({"max_tokens": _WARM_UP_TOKENS, "detokenize": False, "ignore_eos": True})
        async for _ in self.generate("warm-up", await self.prompt([0]), params, priority=0):
            continue

    async def run_unread(
        self,
        request_id: str,
        like: EngineRequest,
        token_ids: Sequence[int],
        transfer_params: Mapping[str, Any],
        priority: int,
        adapter: NumberedAdapter | None = None,
    ) -> str | None:
        """See `UnreadRequests`."""
        params = self.sampling_params(WITHOUT_ANSWER | kv_parameters(transfer_params))
        prompt = await self.prompt(token_ids, like.cache_salt, like.media)
        reason: str | None = None
        async for completion, *_ in self.generate(request_id, prompt, params, priority, adapter=adapter):
            reason = completion.finish_reason
        return reason

    async def take_out(self, request_id: str, internal_id: str) -> None:
        """See `UnreadRequests`. Aborted in the engine core only: what it has generated before still arrives, and then
        nothing more."""
        await self._llm.engine_core.abort_requests_async([internal_id])

    def _verify(self, params: SamplingParams) -> None:
        config = self._llm.vllm_config
        params.verify(
            config.model_config, config.speculative_config, config.structured_outputs_config, self._llm.tokenizer
        )

    async def capture_hidden_states(self, endpoint: str, every_steps: int, lossless: bool) -> str:
        """See `HiddenStateExtension.penstock_capture`; the first reason of several workers. Raises EngineFailed."""
        try:
            reasons = await self._llm.collective_rpc(
                "penstock_capture", timeout=_CALL_TIMEOUT_S, args=(endpoint, every_steps, lossless)
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


@contextmanager
def _reading_media() -> Iterator[None]:
    try:
        yield
    except (RequestRefused, EngineFailed):
        raise
    except VLLMServerError as error:
        raise EngineFailed(f"vLLM failed: {error}") from error
    # A processor is code of transformers, or of a model's own: what it raises says that it cannot take this file.
    except Exception as error:
        raise RequestRefused(f"an image, recording or film cannot be read: {error}") from error


def _queued_ms(metrics: Any) -> float | None:
    """Of a request, by vLLM's statistics of it; None where those do not say."""
    if metrics is None or not metrics.queued_ts or not metrics.scheduled_ts:
        return None
    return max(0.0, 1000.0 * float(metrics.scheduled_ts - metrics.queued_ts))


def _lora_request(adapter: NumberedAdapter) -> LoRARequest:
    about, number = adapter
    return LoRARequest(
        lora_name=about.digest,
        lora_int_id=number,
        lora_path=about.path,
        is_3d_lora_weight=about.is_3d_lora_weight,
    )
