"""vLLM as an engine of the mesh: AsyncLLM in the worker's process, the model in a child process."""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.pooling import PoolingTask
from controlplane.model.request import EngineRequest, FinishReason, StepOutput, TokenDelta
from controlplane.model.step_sample import StepSample
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.pooling import PoolingParameters, known_tasks
from engine_worker.engines.vllm.block_map import BlockMap
from engine_worker.engines.vllm.checkpoint import read_vocabulary
from engine_worker.engines.vllm.deltas import Completion, PromptLogprobs, prompt_positions, token_delta
from engine_worker.engines.vllm.environment import (
    WORKER_PID_VARIABLE,
    engine_environment,
    installed_device,
    set_missing,
)
from engine_worker.engines.vllm.hidden_states.stream import HiddenStateStream
from engine_worker.engines.vllm.imports import kv_parameters
from engine_worker.engines.vllm.kv_events import KvEventStream
from engine_worker.engines.vllm.load import LoadAccount, StepStats
from engine_worker.engines.vllm.migrations import Migrations, migration_obstacle
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.engines.vllm.sampling import refusal, sampling_arguments
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.engines.vllm.step_buffer import StepBuffer
from engine_worker.kv.service import AgentPort
from mesh.errors import ConfigurationError, EngineFailed, QueueFull, RequestRefused
from mesh.tasks import TaskSet

if TYPE_CHECKING:
    from vllm import SamplingParams

    from engine_worker.engines.vllm.core import Core

log = logging.getLogger(__name__)

_LIVENESS_INTERVAL_S = 0.2
_WARM_UP_TOKENS = 2


class VllmEngine:
    """Implements `MovableEngine` and `HiddenStateSource`. vLLM is imported by `start`, never before."""

    def __init__(self, settings: VllmSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._vocabulary = read_vocabulary(Path(settings.model_path))
        self.pooling_tasks: tuple[PoolingTask, ...] = ()
        """See `PoolingEngine`."""
        self._requests: dict[str, EngineRequestState] = {}
        self._tasks = TaskSet("vllm")
        self._buffer = StepBuffer()
        self._block_map = BlockMap(settings.block_size)
        self._load = LoadAccount(kv_blocks=0)
        # The kernel ends the core when the thread that started it does (see `plugin`), so that thread must live.
        self._launcher = ThreadPoolExecutor(1, thread_name_prefix="vllm-launcher")
        self._socket_dir: Path | None = None
        self._core: Core | None = None
        self._kv_events: KvEventStream | None = None
        self._hidden_states: HiddenStateStream | None = None
        self._moves: Migrations | None = None
        """None where requests cannot move."""
        self._limits: EngineLimits | None = None
        self._replay_obstacle: str | None = None
        """Why a request under a grammar cannot go on here after tokens that were emitted before; None if it can."""
        self._failure = ""
        self._is_stopped = False
        self._observe: Callable[[StepSample], None] | None = None

    async def start(self) -> EngineLimits:
        """See `Engine.start`. The event loop goes on meanwhile."""
        device = installed_device()
        set_missing(os.environ, engine_environment(self._settings, device))
        os.environ[WORKER_PID_VARIABLE] = str(os.getpid())
        self._socket_dir = Path(tempfile.mkdtemp(prefix="penstock-"))
        events, replay, moves = (f"ipc://{self._socket_dir}/{name}" for name in ("events", "replay", "moves"))
        self._kv_events = KvEventStream(self._block_map, events, replay)

        reason = migration_obstacle(self._settings, device)
        if reason is None:
            self._moves = Migrations(moves, self._settings.kv_host, self._requests, go_on=self._go_on)
        elif self._settings.movable:
            log.warning("requests of this engine cannot move", extra={"reason": reason})

        def launch() -> "Core":
            from engine_worker.engines.vllm.arguments import KvEndpoints
            from engine_worker.engines.vllm.core import Core

            endpoints = KvEndpoints(events, replay, moves if reason is None else None)
            return Core(self._settings, device, endpoints, self._on_step)

        self._core = await asyncio.get_running_loop().run_in_executor(self._launcher, launch)
        if self._settings.runner == "pooling":
            self.pooling_tasks = known_tasks(await self._core.tasks())
        await self._warm_up(self._core)
        self._limits = self._core.limits()
        self._replay_obstacle = self._core.replay_obstacle()
        if self._settings.structured_outputs is not False and self._replay_obstacle is not None:
            log.warning("structured output cannot go on here", extra={"reason": self._replay_obstacle})
        if self._moves is not None:
            await self._moves.start(self._core, self._limits)
        self._load = LoadAccount(self._limits.kv_blocks)
        self._tasks.spawn(self._watch(self._core), name="liveness", on_error=lambda error: self._die(str(error)))
        return self._limits

    def submit(self, request: EngineRequest) -> None:
        """See `Engine.submit`. Raises EngineFailed if the engine is dead or was never started."""
        core, limits = self._core, self._limits
        if core is None or limits is None or self._failure or self._is_stopped:
            raise EngineFailed(self._failure or "the engine is not running: start it first")
        if self.pooling_tasks:
            raise RequestRefused("this engine serves a pooling model, which answers nothing; ask for embeddings")
        self._check(request, limits)
        self._begin(core, EngineRequestState(request, offset=len(request.emitted_token_ids)))

    async def pool(
        self, request_id: str, token_ids: Sequence[int], parameters: PoolingParameters, priority: int
    ) -> NDArray[np.float32]:
        """See `PoolingEngine`."""
        core, limits = self._core, self._limits
        if core is None or limits is None or self._failure or self._is_stopped:
            raise EngineFailed(self._failure or "the engine is not running: start it first")
        if len(token_ids) > limits.max_model_len_tokens:
            raise RequestRefused(f"{len(token_ids)} tokens, and the model's context is {limits.max_model_len_tokens}")
        if parameters.task not in self.pooling_tasks:
            raise RequestRefused(f"this model does not {parameters.task}; it does {', '.join(self.pooling_tasks)}")
        return await core.pool(request_id, token_ids, parameters, priority)

    def abort(self, request_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None or running.is_aborted or self._core is None:
            return
        running.is_aborted = True
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
        return self._load.report()

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """See `StepSource`; a step lasts from the arrival of the one before to its own."""
        self._observe = observe

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        if self._kv_events is None:
            raise EngineFailed("the engine is not running: start it first")
        async for change in self._kv_events.changes():
            yield change

    async def capture_hidden_states(self, every_steps: int) -> str:
        core, directory = self._core, self._socket_dir
        if core is None or directory is None:
            raise EngineFailed("the engine is not running: start it first")
        endpoint = f"ipc://{directory}/hidden-states"
        if self._hidden_states is None:
            self._hidden_states = HiddenStateStream(endpoint)
        return await core.capture_hidden_states(endpoint, every_steps)

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """Yields captured states; call `capture_hidden_states` first."""
        if self._hidden_states is None:
            raise EngineFailed("no hidden states are captured: call capture_hidden_states first")
        async for states in self._hidden_states.states():
            yield states

    @property
    def kv_address(self) -> str:
        """See `MovableEngine.kv_address`; empty where requests cannot move."""
        return "" if self._moves is None else self._moves.kv_address

    def kv_agent(self) -> AgentPort:
        if self._moves is None:
            raise ConfigurationError("this engine has no KV transfer agent: requests cannot move to or from it")
        return self._moves.agent

    @property
    def kv_block_bytes(self) -> int:
        """See `MovableEngine`; 0 where requests cannot move."""
        return 0 if self._moves is None else self._moves.kv_block_bytes

    def export(self, request_id: str, migration_id: str, on_progress: Callable[[ExportProgress], None]) -> None:
        running = self._requests.get(request_id)
        if running is None:
            raise RequestRefused(f"no request {request_id!r} runs here; it may have ended")
        self._movable.exports.export(running, migration_id, on_progress)

    async def pause(self, request_id: str) -> PausedRequest | None:
        running = self._requests.get(request_id)
        return None if running is None else await self._movable.exports.pause(running)

    def resume(self, request_id: str) -> None:
        """See `MovableEngine.resume`. The request is submitted again; the prefix cache has its full blocks."""
        running = self._requests.get(request_id)
        if running is not None:
            self._movable.exports.resume(running)

    def withdraw(self, request_id: str, migration_id: str) -> None:
        self._movable.exports.withdraw(migration_id)

    def release(self, request_id: str, migration_id: str) -> None:
        running = self._requests.get(request_id)
        if running is None or not running.is_paused:
            return
        del self._requests[request_id]
        self._load.left(request_id)
        self._movable.exports.release(running)

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        moves, limits = self._movable, self._limits
        if limits is None:
            raise EngineFailed("the engine is not running: start it first")
        self._check(request, limits)
        self._check_grammar_goes_on(request)
        await moves.imports.reserve(migration_id, request, len(self._requests))

    async def pull(
        self,
        migration_id: str,
        peer: str,
        first_block: int,
        peer_block_ids: tuple[int, ...],
        emitted_token_ids: tuple[int, ...],
        deadline_s: float,
    ) -> None:
        imports = self._movable.imports
        await imports.pull(migration_id, peer, first_block, peer_block_ids, emitted_token_ids, deadline_s)

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        """See `MovableEngine.activate`. Raises what `submit` raises."""
        moves, core, limits = self._movable, self._core, self._limits
        if core is None or limits is None or self._failure or self._is_stopped:
            raise EngineFailed(self._failure or "the engine is not running: start it first")
        request, transfer_params = moves.imports.arrived(migration_id, emitted_token_ids, computed_tokens)
        try:
            self._check(request, limits)
            # It ran before, so it goes before those of its priority which have not begun.
            self._begin(
                core,
                EngineRequestState(request, offset=len(emitted_token_ids)),
                transfer_params,
                priority=request.priority - 1,
            )
        except RequestRefused:
            moves.unstage(migration_id)
            raise

    def discard(self, migration_id: str) -> None:
        self._movable.imports.discard(migration_id)

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
        if self._kv_events is not None:
            self._kv_events.close()
        if self._hidden_states is not None:
            self._hidden_states.close()
        if self._core is not None:
            self._core.stop_reading()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._launcher, self._core.shutdown, self._settings.stop_timeout_s)
        self._launcher.shutdown(wait=False)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)

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
    def _movable(self) -> Migrations:
        if self._moves is None:
            raise RequestRefused("requests of this engine cannot move (its log says why)")
        return self._moves

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
        arguments = sampling_arguments(request, self._vocabulary)
        if self._moves is not None:
            told: dict[str, Any] = {"request_id": request.request_id} | (transfer_params or {})
            if request.sampling.structured_outputs and request.emitted_token_ids:
                told["grammar_tokens"] = core.grammar_tokens(request.prompt_token_ids, request.emitted_token_ids)
            arguments |= kv_parameters(told, arguments["extra_args"])
        params = core.sampling_params(arguments)
        context = request.prompt_token_ids + request.emitted_token_ids
        cached_tokens = (
            self._block_map.cached_tokens(context, request.cache_salt)
            if transfer_params is None
            else transfer_params["computed_tokens"]
        )
        priority = request.priority if priority is None else priority
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
            last = TokenDelta(running.request_id, running.offset, (), finish_reason=FinishReason.ABORT)
            self._end(running, last)
        elif self._core is not None:
            self._load.left(running.request_id)
            self._begin(self._core, running, priority=running.request.priority - 1)

    async def _warm_up(self, core: "Core") -> None:
        """The first step imports and allocates for seconds; better now than on somebody's request. Too short to
        leave a block in the cache."""
        if self.pooling_tasks:
            await core.pool("warm-up", [0], PoolingParameters(self.pooling_tasks[0]), priority=0)
            return
        params = core.sampling_params({"max_tokens": _WARM_UP_TOKENS, "detokenize": False, "ignore_eos": True})
        async for _ in core.generate("warm-up", [0], params, priority=0):
            continue

    async def _serve(
        self,
        core: "Core",
        running: EngineRequestState,
        context: tuple[int, ...],
        params: "SamplingParams",
        priority: int,
    ) -> None:
        try:
            request = running.request
            steps = core.generate(
                running.request_id, context, params, priority, request.cache_salt, request.traceparent
            )
            async for completion, cached_tokens, prompt_logprobs in steps:
                self._deliver(running, completion, cached_tokens, prompt_logprobs)
        except RequestRefused as refused:
            self._end_with_error(running, str(refused))
        except EngineFailed as failed:
            if core.is_dead:
                self._die(str(failed))
            else:
                self._end_with_error(running, str(failed))

    def _deliver(
        self,
        running: EngineRequestState,
        completion: Completion,
        cached_tokens: int | None,
        prompt_logprobs: PromptLogprobs,
    ) -> None:
        if running.request_id not in self._requests:
            return
        request = running.request
        delta = token_delta(
            running.request_id,
            running.offset,
            completion,
            logprobs=request.sampling.logprobs,
            cached_tokens=cached_tokens if running.tells_cached else None,
            prompt_logprobs=prompt_positions(
                request.prompt_token_ids, prompt_logprobs, request.sampling.prompt_logprobs or 0
            ),
        )
        if delta.token_ids:
            running.tells_cached = False
            running.offset += len(delta.token_ids)
            self._load.produced(running.request_id, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._end(running, delta)
        elif delta.token_ids:
            self._buffer.add(delta)
        if self._moves is not None:
            self._moves.exports.delivered(running)

    def _end_with_error(self, running: EngineRequestState, message: str) -> None:
        self._end(
            running,
            TokenDelta(running.request_id, running.offset, (), finish_reason=FinishReason.ERROR, error=message),
        )

    def _end(self, running: EngineRequestState, last: TokenDelta) -> None:
        if self._requests.pop(running.request_id, None) is not None:
            self._load.ended(running.request_id)
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
