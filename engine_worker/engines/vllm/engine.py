"""vLLM as an engine of the mesh: AsyncLLM in the worker's process, the model in a child process."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.model.media_facts import MediaFacts
from controlplane.model.pooling import PoolingTask
from controlplane.model.request import EngineRequest, FinishReason, StepOutput, TokenDelta, engine_priority
from controlplane.model.step_sample import StepSample
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.media import check_expanded
from engine_worker.engines.pooling import PoolingParameters
from engine_worker.engines.step_buffer import StepBuffer
from engine_worker.engines.vllm.block_map import BlockMap
from engine_worker.engines.vllm.carriers import kv_parameters
from engine_worker.engines.vllm.checkpoint import read_vocabulary
from engine_worker.engines.vllm.deltas import Completion, PromptLogprobs, prompt_positions, token_delta
from engine_worker.engines.vllm.hidden_states.stream import HiddenStateStream
from engine_worker.engines.vllm.host_tier import VllmHostTier
from engine_worker.engines.vllm.kv_events import KvEventStream
from engine_worker.engines.vllm.load import LoadAccount, StepStats
from engine_worker.engines.vllm.logprob_turns import LogprobTurns
from engine_worker.engines.vllm.migrations import NO_STORES, Migrations
from engine_worker.engines.vllm.movable import MovableByConnector
from engine_worker.engines.vllm.processes import VllmProcesses
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.engines.vllm.sampling import refusal, sampling_arguments
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import AdapterUnavailable, EngineFailed, QueueFull, RequestRefused
from mesh.tasks import TaskSet
from mesh.text_files import TextFiles

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs import EngineInput

    from engine_worker.engines.vllm.core import Core

log = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 0.2


class VllmEngine(MovableByConnector[Migrations, EngineRequestState]):
    """Implements `MovableEngine`, `PrefixEngine` and `HiddenStateSource`. vLLM is imported by `start`, never before."""

    host_store, disk_store = NO_STORES

    def __init__(
        self,
        settings: VllmSettings,
        clock: Callable[[], float] = time.monotonic,
        processes: VllmProcesses | None = None,
        data_parallel_rank: int = 0,
    ) -> None:
        """With data parallelism this is the engine of one core, and `processes` are those of all."""
        super().__init__(
            "the engine has not been started", is_to_move=settings.movable and settings.runner != "pooling"
        )
        self._settings = settings
        self._processes = processes or VllmProcesses(settings, clock)
        self._data_parallel_rank = data_parallel_rank
        self._clock = clock
        self._vocabulary = read_vocabulary(Path(settings.model_path))
        self.pooling_tasks: tuple[PoolingTask, ...] = ()
        self.has_separator = True
        """See `PoolingEngine` of both."""
        self.media: Mapping[str, MediaFacts] = {}
        """See `MediaEngine`."""
        self._tasks = TaskSet("vllm")
        self._buffer = StepBuffer()
        self._block_map = BlockMap(settings.block_size)
        self._load = LoadAccount(kv_blocks=0)
        self._core: Core | None = None
        self._kv_events: KvEventStream | None = None
        self._hidden_states: HiddenStateStream | None = None
        self._loras = self._processes.loras
        self.lora_modules, self.adapters = self._loras.modules, self._loras.cache
        self.load_adapter, self.unload_adapter = self._loras.load, self._loras.unload
        self._logprob_turns = LogprobTurns(is_needed=False)
        self._host = VllmHostTier(settings)
        self._limits: EngineLimits | None = None
        self._replay_obstacle: str | None = None
        """Why a request under a grammar cannot go on here after tokens that were emitted before; None if it can."""
        self._failure = ""
        self._is_stopped = False
        self._observe: Callable[[StepSample], None] | None = None

    async def start(self) -> EngineLimits:
        """See `Engine.start`. The event loop goes on meanwhile."""
        self._processes.prepare()
        self._kv_events = KvEventStream(self._block_map, self._endpoint("events"), self._endpoint("replay"))
        if self._processes.obstacle is None:
            host = self._settings.kv_host
            self._moves = Migrations(self._endpoint("moves"), host, self._requests, self._go_on, self._host)
        else:
            self._immovable = self._processes.obstacle
        self._core = await self._processes.core(self._data_parallel_rank, self._on_step, self._host)
        self.media = self._core.media()
        if self._settings.runner == "pooling":
            self.pooling_tasks, self.has_separator = await self._core.pooling()
        await self._core.warm_up(self.pooling_tasks)
        self._limits = self._core.limits()
        self.adapters = self._loras.cache
        if self._moves is not None:
            starting = self._moves.start(self._core, self._limits, self._loras)
            self.host_store, self.disk_store = await self._unless_immovable(self._moves, starting) or NO_STORES
        self._replay_obstacle = self._core.replay_obstacle(is_movable=self._moves is not None)
        if self._settings.structured_outputs is not False and self._replay_obstacle is not None:
            log.warning("structured output cannot go on here", extra={"reason": self._replay_obstacle})
        self._load = LoadAccount(self._limits.kv_blocks)
        self._logprob_turns = LogprobTurns(is_needed=self._core.mixes_logprobs)
        self._tasks.spawn(self._watch(self._core), name="liveness", on_error=lambda error: self._die(str(error)))
        return self._limits

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`. Raises EngineFailed if the engine is dead or was never started."""
        core, limits = self._running
        if self.pooling_tasks:
            raise RequestRefused("this engine serves a pooling model, which answers nothing; ask for embeddings")
        self._check(request, limits)
        self._begin(core, EngineRequestState(request, offset=len(request.emitted_token_ids)))

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """See `PoolingEngine`."""
        core, limits = self._running
        if len(token_ids) > limits.max_model_len_tokens:
            raise RequestRefused(f"{len(token_ids)} tokens, and the model's context is {limits.max_model_len_tokens}")
        if parameters.task not in self.pooling_tasks:
            raise RequestRefused(f"this model does not {parameters.task}; it does {', '.join(self.pooling_tasks)}")
        return await core.pool(request_id, token_ids, parameters, priority)

    def text_files(self, checkpoint: TextFiles) -> TextFiles:
        """See `TextEngine`."""
        return self._running[0].text_files(checkpoint)

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """See `MediaEngine`."""
        return await self._running[0].expand(media)

    def abort(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None or running.is_aborted or self._core is None:
            return
        running.is_aborted = True
        self._logprob_turns.aborted(running)
        # A paused request brings no delta: it ends when it is resumed, or silently when it is released.
        if not running.is_paused:
            self._tasks.spawn(self._core.abort(request_id), name=f"abort {request_id}")

    async def outputs(self) -> AsyncIterator[StepOutput]:
        while (step := await self._buffer.take()) is not None:
            yield step
        if self._failure:
            raise EngineFailed(self._failure)

    def load(self) -> LoadReport:
        """See `Engine.load`, and `load.py` for how exact it is."""
        return self._host.reported(self._load.report(self.adapters.load(self._clock())))

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """See `StepSource`; a step lasts from the arrival of the one before to its own."""
        self._observe = observe

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        if self._kv_events is None:
            raise EngineFailed("the engine is not running: start it first")
        async for change in self._kv_events.changes():
            yield change

    async def capture_hidden_states(self, every_steps: int, lossless: bool = False) -> str:
        """See `HiddenStateSource`. `lossless`, for a data set: the engine waits, rather than that a state is lost."""
        core, _ = self._running
        endpoint = self._endpoint("hidden-states")
        if self._hidden_states is None:
            self._hidden_states = HiddenStateStream(endpoint)
        return await core.capture_hidden_states(endpoint, every_steps, lossless)

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """Yields captured states; call `capture_hidden_states` first."""
        if self._hidden_states is None:
            raise EngineFailed("no hidden states are captured: call capture_hidden_states first")
        async for states in self._hidden_states.states():
            yield states

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        moves, (_, limits) = self._movable, self._running
        self._check(request, limits)
        self._check_grammar_goes_on(request)
        if request.media is not None:  # now, and from memory when it has arrived and stands still
            check_expanded(request.prompt_token_ids, request.media, await self.expand(request.media))
        async with self._loras.reserved(migration_id, request.adapter) as adapter:
            await moves.imports.reserve(migration_id, request, len(self._requests), adapter)

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        """See `MovableEngine.activate`. Raises what `submit` raises."""
        moves, (core, limits) = self._movable, self._running
        request, transfer_params = moves.imports.arrived(migration_id, emitted_token_ids, computed_tokens)
        try:
            self._check(request, limits)
            # It ran before, so it goes before those of its priority which have not begun.
            self._begin(
                core,
                EngineRequestState(request, offset=len(emitted_token_ids), staged=migration_id),
                transfer_params,
                priority=engine_priority(request.priority - 1),
            )
        except RequestRefused:
            moves.unstage(migration_id)
            raise
        finally:
            self.adapters.end(migration_id)

    def discard(self, migration_id: str) -> None:
        self.adapters.end(migration_id)
        super().discard(migration_id)

    async def stop(self) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        for running in tuple(self._requests.values()):
            self._end(running, TokenDelta(running.request_id, running.offset, (), finish_reason=FinishReason.ABORT))
        self._buffer.close()
        await self._tasks.cancel()
        if self._moves is not None:
            await self._moves.close()
        for stream in (self._kv_events, self._hidden_states, self.host_store, self.disk_store):
            if stream is not None:
                stream.close()
        if self._data_parallel_rank == 0:
            await self._processes.stop()

    def runs(self, request_id: str) -> bool:
        """See `CoreEngine`."""
        return request_id in self._requests

    def cached_tokens(self, request: EngineRequest) -> int:
        """See `CoreEngine`; by vLLM's KV events."""
        context = request.prompt_token_ids + request.emitted_token_ids
        return self._block_map.cached_tokens(context, request.cache_salt, request.media_spans, request.adapter_digest)

    def _endpoint(self, name: str) -> str:
        return self._processes.endpoint(name, self._data_parallel_rank)

    def _check(self, request: EngineRequest, limits: EngineLimits) -> None:
        if request.request_id in self._requests:
            raise RequestRefused(f"a request {request.request_id!r} is running already: ids must be unique")
        if len(self._requests) >= limits.max_batch_requests + self._settings.max_queued_requests:
            raise QueueFull(f"the engine's queue of {self._settings.max_queued_requests} requests is full")
        reason = refusal(
            request,
            self._vocabulary,
            max_model_len_tokens=limits.max_model_len_tokens,
            max_logprobs=self._settings.max_logprobs,
        )
        if reason is not None:
            raise RequestRefused(reason)
        if request.emitted_token_ids:
            self._check_grammar_goes_on(request)

    def _check_grammar_goes_on(self, request: EngineRequest) -> None:
        """Rather no answer than one that is broken where it went on."""
        if request.sampling.structured_outputs and self._replay_obstacle is not None:
            raise RequestRefused(f"structured output cannot go on at this instance: {self._replay_obstacle}")

    @property
    def _running(self) -> "tuple[Core, EngineLimits]":
        core, limits = self._core, self._limits
        if core is None or limits is None or self._failure or self._is_stopped:
            raise EngineFailed(self._failure or "the engine is not running: start it first")
        return core, limits

    def _left(self, request_id: str) -> None:
        self._load.left(request_id)
        self.adapters.end(request_id)

    def _begin(
        self,
        core: "Core",
        running: EngineRequestState,
        transfer_params: dict[str, Any] | None = None,
        *,
        priority: int | None = None,
    ) -> None:
        """Hand a request to vLLM, from where it stands. `transfer_params` is for the connector."""
        request = running.request
        self._loras.begin(request.request_id, request.adapter)
        arguments = sampling_arguments(request, self._vocabulary)
        if self._moves is not None:
            told: dict[str, Any] = {"request_id": request.request_id} | (transfer_params or {})
            if request.sampling.structured_outputs and request.emitted_token_ids:
                told["grammar_tokens"] = core.grammar_tokens(request.prompt_token_ids, request.emitted_token_ids)
            arguments |= kv_parameters(told, arguments["extra_args"])
        params = core.sampling_params(arguments)
        context = request.prompt_token_ids + request.emitted_token_ids
        cached_tokens = self.cached_tokens(request) if transfer_params is None else transfer_params["computed_tokens"]
        priority = request.engine_priority if priority is None else priority
        self._load.submitted(request.request_id, len(context), cached_tokens, priority, self._clock())
        self._requests[request.request_id] = running
        running.serving = self._tasks.spawn(
            self._serve(core, running, context, params, priority),
            name=request.request_id,
            on_error=lambda error: self._end_with_error(running, repr(error)),
        )

    def _go_on(self, running: EngineRequestState) -> None:
        """Submit a paused request again."""
        if running.serving is not None:
            running.serving.cancel()
        self._movable.exports.resumed(running)
        if running.is_aborted:
            self._end(running, TokenDelta(running.request_id, running.offset, (), finish_reason=FinishReason.ABORT))
        elif self._core is not None:
            self._load.left(running.request_id)
            self._begin(self._core, running, priority=engine_priority(running.request.priority - 1))

    async def _serve(
        self, core: "Core", running: EngineRequestState, known: tuple[int, ...], params: "SamplingParams", priority: int
    ) -> None:
        try:
            request = running.request
            adapter = await self._loras.ready(request.adapter)
            async with self._logprob_turns.turn(running):
                prompt = await self._prompt(core, running, known)
                if prompt is None:
                    return
                steps = core.generate(running.request_id, prompt, params, priority, request.traceparent, adapter)
                async for completion, cached_tokens, prompt_logprobs, queued_ms in steps:
                    self._deliver(running, completion, cached_tokens, prompt_logprobs, queued_ms)
        except AdapterUnavailable as unavailable:
            self._end_with_error(running, str(unavailable), may_go_elsewhere=True)
        except RequestRefused as refused:
            self._end_with_error(running, str(refused))
        except EngineFailed as failed:
            if core.is_dead:
                self._die(str(failed))
            else:
                self._end_with_error(running, str(failed))

    async def _prompt(
        self, core: "Core", running: EngineRequestState, context: tuple[int, ...]
    ) -> "EngineInput | None":
        """Reads its images, if it has any; vLLM learns of the request only then. None if it was taken back meanwhile.
        Raises RequestRefused."""
        request, staged = running.request, running.staged
        prompt: EngineInput | None = None
        running.staged = ""
        try:
            prompt = await core.prompt(context, request.cache_salt, request.media)
        finally:
            if staged and (prompt is None or running.is_aborted):
                self._movable.unstage(staged)
        if not running.is_aborted:
            return prompt
        self._end(running, TokenDelta(request.request_id, running.offset, (), finish_reason=FinishReason.ABORT))
        return None

    def _deliver(
        self,
        running: EngineRequestState,
        completion: Completion,
        cached_tokens: int | None,
        prompt_logprobs: PromptLogprobs,
        queued_ms: float | None,
    ) -> None:
        if running.request_id not in self._requests:
            return
        request = running.request
        delta = token_delta(
            running.request_id,
            running.offset,
            completion,
            logprobs=request.sampling.logprobs,
            named_token_ids=request.sampling.logprob_token_ids,
            cached_tokens=cached_tokens if running.tells_cached else None,
            queued_ms=queued_ms if running.tells_cached else None,
            prompt_logprobs=prompt_positions(
                request.prompt_token_ids, prompt_logprobs, request.sampling.prompt_logprobs or 0
            ),
        )
        if delta.token_ids:
            self._host.cached(running.request_id, delta.cached_tokens)
            running.tells_cached = False
            running.offset += len(delta.token_ids)
            self._load.produced(running.request_id, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._end(running, delta)
        elif delta.token_ids:
            self._buffer.add(delta)
        if self._moves is not None:
            self._moves.exports.delivered(running)

    def _end_with_error(self, running: EngineRequestState, message: str, *, may_go_elsewhere: bool = False) -> None:
        last = TokenDelta(running.request_id, running.offset, (), finish_reason=FinishReason.ERROR, error=message)
        self._end(running, replace(last, may_go_elsewhere=may_go_elsewhere))

    def _end(self, running: EngineRequestState, last: TokenDelta) -> None:
        if self._requests.pop(running.request_id, None) is not None:
            self._load.ended(running.request_id)
            self.adapters.end(running.request_id)
            self._buffer.add(last)
            if self._moves is not None:
                self._moves.exports.ended(running)

    def _on_step(self, stats: StepStats) -> None:
        self._load.stepped(stats, self._clock())
        if self._observe is not None and (sample := self._load.step_sample()) is not None:
            self._observe(sample)

    async def _watch(self, core: "Core") -> None:
        # vLLM tells the running requests of the core's death; when none is running, one has to look.
        while not core.is_dead:  # noqa: ASYNC110
            await asyncio.sleep(_LIVENESS_INTERVAL_S)
        self._die("the engine core process died (its own log says why)")

    def _die(self, reason: str) -> None:
        if not self._failure and not self._is_stopped:
            self._failure = reason
            log.error("the engine died", extra={"reason": reason, "running_requests": len(self._requests)})
            self._buffer.close()
            if self._moves is not None:
                self._moves.fail(reason)
