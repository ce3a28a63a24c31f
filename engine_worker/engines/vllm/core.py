"""vLLM's AsyncLLM: started, asked and shut down. With `step_stats`, the only module that imports vLLM, so it must
not be imported before the environment is set (see `environment`)."""

import multiprocessing
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError, VLLMError, VLLMServerError
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.connector.staging import STAGING_BLOCKS
from engine_worker.engines.vllm.deltas import Completion, PromptLogprobs
from engine_worker.engines.vllm.environment import Device
from engine_worker.engines.vllm.hidden_states.extension import EXTENSION_CLASS
from engine_worker.engines.vllm.kv_events import BUFFERED_BATCHES
from engine_worker.engines.vllm.load import StepStats
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.engines.vllm.step_stats import step_logger_class
from mesh.errors import EngineFailed, RequestRefused

_CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
_REAP_S = 1.0
_CAPTURE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Where the engine core publishes its KV events, where it replays them, and its end of the control channel for
    requests that move (None: they do not)."""

    events: str
    replay: str
    moves: str | None


class Core:
    """One AsyncLLM and its core process."""

    def __init__(
        self,
        settings: VllmSettings,
        device: Device,
        endpoints: KvEndpoints,
        on_step: Callable[[StepStats], None],
    ) -> None:
        """Loads the model, which takes seconds to minutes. Raises EngineFailed."""
        others = multiprocessing.active_children()
        try:
            self._llm = AsyncLLM.from_engine_args(
                _engine_arguments(settings, device, endpoints), stat_loggers=[step_logger_class(on_step)]
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
            kv_blocks=config.cache_config.num_gpu_blocks - 1,
            max_model_len_tokens=config.model_config.max_model_len,
            max_batch_requests=config.scheduler_config.max_num_seqs,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            tensor_parallel=config.parallel_config.tensor_parallel_size,
            pipeline_parallel=config.parallel_config.pipeline_parallel_size,
        )

    def sampling_params(self, arguments: dict[str, Any]) -> SamplingParams:
        """Raises RequestRefused if vLLM does not accept the arguments."""
        try:
            return SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error

    async def generate(
        self, request_id: str, token_ids: Sequence[int], params: SamplingParams, priority: int, cache_salt: str = ""
    ) -> AsyncIterator[tuple[Completion, int | None, PromptLogprobs]]:
        """What each step adds, with the number of tokens found in the prefix cache where it is known, and the prompt's
        logprobs where they were asked for. Once an earlier request was served, the request is known to vLLM as soon as
        the iteration is first awaited.

        Raises RequestRefused if vLLM does not take the request and EngineFailed if it cannot go on.
        """
        prompt = tokens_input(list(token_ids), cache_salt=cache_salt or None)
        try:
            async for output in self._llm.generate(prompt, params, request_id, priority=priority):
                yield output.outputs[0], output.num_cached_tokens, output.prompt_logprobs or ()
        except VLLMServerError as error:
            raise EngineFailed(f"vLLM failed: {error}") from error
        except (ValueError, VLLMClientError) as error:
            raise RequestRefused(str(error)) from error

    async def take_out(self, internal_id: str) -> None:
        """Abort in the engine core only: what it has generated before still arrives, and then nothing more.
        `internal_id` is vLLM's own id of the request."""
        await self._llm.engine_core.abort_requests_async([internal_id])

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


def _engine_arguments(settings: VllmSettings, device: Device, endpoints: KvEndpoints) -> AsyncEngineArgs:
    on_cpu = device == "cpu"
    kv_cache_bytes = settings.kv_cache_bytes
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    return AsyncEngineArgs(
        model=settings.model_path,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len_tokens,
        block_size=settings.block_tokens,
        max_num_seqs=settings.max_batch_requests,
        max_num_batched_tokens=settings.max_step_tokens,
        max_logprobs=settings.max_logprobs,
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel,
        pipeline_parallel_size=settings.pipeline_parallel,
        enforce_eager=on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        # Text stays in the frontend, and a tokenizer costs start-up time and memory.
        skip_tokenizer_init=True,
        # vLLM's periodic log line; the statistics themselves reach the stat logger all the same.
        disable_log_stats=True,
        # Despite its name, this is what puts the tokens that a step prefilled into the statistics.
        enable_logging_iteration_details=True,
        kv_events_config=KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoints.events,
            replay_endpoint=endpoints.replay,
            buffer_steps=BUFFERED_BATCHES,
            hwm=BUFFERED_BATCHES,
        ),
        worker_extension_cls=EXTENSION_CLASS,
        kv_transfer_config=None if endpoints.moves is None else _connector(settings, device, endpoints.moves),
    )


def _connector(settings: VllmSettings, device: Device, endpoint: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="PenstockConnector",
        kv_connector_module_path="engine_worker.engines.vllm.connector.connector",
        kv_role="kv_both",
        # What could not be pulled ends the carrier that was to bring it, and nothing else.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "endpoint": endpoint,
            "device": device,
            "port": settings.kv_port,
            "model": Path(settings.model_path).name,
            "staging_blocks": STAGING_BLOCKS,
        },
    )
