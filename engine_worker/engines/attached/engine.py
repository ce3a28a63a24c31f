"""A running server as an engine of the mesh. It is neither started nor stopped here."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, FinishReason, StepOutput, TokenDelta
from engine_worker.engines.attached import wire
from engine_worker.engines.attached.client import ServerClient, ServerLost
from engine_worker.engines.attached.load import AttachedLoad
from engine_worker.engines.attached.moves import AttachedMoves, AttachedRequest
from engine_worker.engines.attached.probe import MetricsReader, find_abilities, limits_of, wait_for_model
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.attached.text import TextTokenizer
from engine_worker.engines.attached.wire import Abilities, Chunk, ServedModel, ServerMetrics, StreamError
from engine_worker.engines.hidden_state_source import HiddenStates
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.movable import ExportProgress
from engine_worker.engines.step_buffer import StepBuffer
from engine_worker.engines.vllm import sampling
from engine_worker.engines.vllm.block_map import BlockMap
from engine_worker.engines.vllm.checkpoint import read_vocabulary
from engine_worker.engines.vllm.connector.endpoint import of_core
from engine_worker.engines.vllm.kv_events import KvEventStream
from engine_worker.engines.vllm.movable import MovableByConnector
from engine_worker.engines.vllm.running import EngineRequestState
from mesh.errors import EngineFailed, QueueFull, RequestRefused
from mesh.runtime import Clock
from mesh.tasks import TaskSet

log = logging.getLogger(__name__)

_ATTEMPTS = 4
"""Of one request without a token in between; then it ends with an error, and the server lives all the same."""
_FIRST_PAUSE_S = 0.1
_MISSES = 2
"""Questions in a row without an answer after which the server is taken for lost."""
KV_KIND: Final = "vllm"
"""What a server whose KV moves is called in the mesh: as own engines whose KV it exchanges."""
_MODELS_EVERY = 4
"""Polls after which its models are asked for again."""


class AttachedEngine(MovableByConnector[AttachedMoves, AttachedRequest]):
    """Implements `Engine`, and for a server that was started with our connector `MovableEngine`, `PrefixEngine` and
    `HiddenStateSource`. Where the server goes, hangs, is started anew or has another model, the engine fails: the
    worker ends, its requests are recovered elsewhere, and the next worker finds what is there by then."""

    def __init__(
        self, settings: AttachedSettings, clock: Clock, core: int | None = None, metrics: MetricsReader | None = None
    ) -> None:
        """`core`: of a server with data parallelism, this is the engine core of that number, and `metrics` those of
        all; None: this is all of the server. Raises `ConfigurationError` for a URL that is none, and `EngineFailed`
        for a model path without a model."""
        super().__init__("the server was not started with Penstock's connector", is_to_move=bool(settings.control))
        self._settings = settings
        self._clock = clock
        self._core = core
        self._client = ServerClient(settings.url, settings.api_key, settings.answer_s, core)
        self._metrics = metrics or MetricsReader(self._client, clock)
        self._vocabulary = read_vocabulary(Path(settings.model_path))
        # The same request may come to another core while the first one has not noticed yet that it is gone there.
        self._streams = count(core or 0, settings.data_parallel_size)
        self._tasks = TaskSet("attached")
        self._buffer = StepBuffer()
        self._kv_events: KvEventStream | None = None
        self._block_map = BlockMap(1)
        self._load = AttachedLoad(0, 1)
        self._text: TextTokenizer | None = None
        self._model: ServedModel | None = None
        self._abilities: Abilities | None = None
        self._limits: EngineLimits | None = None
        self._has_metrics = False
        self._started_s = 0.0
        self._failure = ""
        self._stopped = asyncio.Event()

    @property
    def server_metrics(self) -> str:
        """See `ServedEngine`; of a server with data parallelism, those of all its cores."""
        return self._metrics.latest_text

    async def start(self) -> EngineLimits:
        """Find out what the server has and can. Raises `EngineFailed` and `ConfigurationError`."""
        self._model = await wait_for_model(self._client, self._settings, self._clock)
        self._abilities = await find_abilities(self._client, self._model)
        metrics = await self._metrics.read(self._core)
        self._has_metrics, self._started_s = metrics is not None, metrics.started_s if metrics else 0.0
        self._limits = limits = limits_of(self._settings, self._model, metrics, self._abilities)
        if not (self._abilities.takes_tokens and self._abilities.tells_tokens):
            self._text = TextTokenizer(Path(self._settings.model_path))
            log.warning("the attached server is talked to by text: its tokens are this side's", extra={"url": self.url})
        self._load = AttachedLoad(limits.kv_blocks, limits.block_tokens)
        self._block_map = BlockMap(limits.block_tokens)
        if self._settings.kv_events:
            self._kv_events = KvEventStream(
                self._block_map,
                of_core(self._settings.kv_events, self._core or 0),
                of_core(self._settings.kv_replay, self._core or 0),
                catches_up=True,
            )
        if self._settings.control:
            await self._control(of_core(self._settings.control, self._core or 0), self._model, limits)
            if self._moves is not None:
                self._limits = limits = replace(limits, label=KV_KIND)
        self._tasks.spawn(self._watch(), name="watch", on_error=lambda error: self._die(str(error)))
        log.info("attached", extra={"url": self.url, "served_model": self._model.name, "kind": self._abilities.label})
        return limits

    @property
    def url(self) -> str:
        """Of the server."""
        return self._client.url

    def submit(self, request: EngineRequest) -> None:
        self._check(request)
        self._begin(AttachedRequest(request, offset=len(request.emitted_token_ids)))

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`. The connection is closed, which is how the server hears of it."""
        running = self._requests.get(request_id)
        if running is None:
            return
        running.is_aborted = True
        # A paused request brings no delta: it ends when it is resumed, or silently when it is released.
        if not running.is_paused:
            if running.serving is not None:
                running.serving.cancel()
            self._end(running, FinishReason.ABORT)

    async def outputs(self) -> AsyncIterator[StepOutput]:
        while (step := await self._buffer.take()) is not None:
            yield step
        if self._failure:
            raise EngineFailed(self._failure)

    def load(self) -> LoadReport:
        return self._load.report()

    async def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """Nothing ever comes from a server whose KV events are not known."""
        if self._kv_events is None:
            await self._stopped.wait()
            return
        async for change in self._kv_events.changes():
            yield change

    def runs(self, request_id: str) -> bool:
        """See `CoreEngine`."""
        return request_id in self._requests

    def cached_tokens(self, request: EngineRequest) -> int:
        """See `CoreEngine`; by the server's KV events."""
        context = request.prompt_token_ids + request.emitted_token_ids
        return self._block_map.cached_tokens(context, request.cache_salt)

    async def stop(self) -> None:
        """End all requests here. The server goes on."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        for request_id in tuple(self._requests):
            self.abort(request_id)
        self._buffer.close()
        await self._tasks.cancel()
        if self._moves is not None:
            await self._moves.close()
        if self._kv_events is not None:
            self._kv_events.close()
        await self._client.close()

    def export(
        self, request_id: str, migration_id: str, kv_token: str, on_progress: Callable[[ExportProgress], None]
    ) -> None:
        running = self._requests.get(request_id)
        if running is not None and running.request.sampling.structured_outputs:
            raise RequestRefused(
                "structured output cannot go on at an attached server, if the migration comes to nothing"
            )
        super().export(request_id, migration_id, kv_token, on_progress)

    async def reserve(self, migration_id: str, request: EngineRequest) -> None:
        moves = self._movable
        self._check(request)
        if request.adapter is not None or request.media is not None or request.sampling.structured_outputs:
            raise RequestRefused("requests with an adapter, images or a structure do not move to an attached server")
        await moves.imports.reserve(migration_id, request, len(self._requests))

    def activate(self, migration_id: str, emitted_token_ids: tuple[int, ...], computed_tokens: int) -> None:
        """See `MovableEngine.activate`. Raises what `submit` raises."""
        moves = self._movable
        request, transfer_params = moves.imports.arrived(migration_id, emitted_token_ids, computed_tokens)
        try:
            self._check(request)
        except RequestRefused:
            moves.unstage(migration_id)
            raise
        running = AttachedRequest(request, offset=len(emitted_token_ids), transfer_params=transfer_params)
        self._begin(running, transfer_params["computed_tokens"])

    async def capture_hidden_states(self, every_steps: int) -> str:
        if self._moves is None:
            return "the attached server was not started with Penstock's connector (see docs/attach.md)"
        return await self._moves.capture_hidden_states(every_steps)

    async def hidden_states(self) -> AsyncIterator[HiddenStates]:
        """Yields captured states; call `capture_hidden_states` first."""
        async for states in self._movable.hidden_states():
            yield states

    async def _control(self, endpoint: str, model: ServedModel, limits: EngineLimits) -> None:
        moves = self._moves = AttachedMoves(
            endpoint,
            self._settings.control_token,
            self._client,
            self._clock,
            self._requests,
            begin_again=self._stream_again,
            go_on=self._go_on,
            lost=self._die,
        )
        await self._unless_immovable(moves, moves.start(model.name, limits))

    def _left(self, request_id: str) -> None:
        self._load.ended(request_id, self._clock.now_s())

    def _check(self, request: EngineRequest) -> None:
        limits, abilities = self._limits, self._abilities
        if limits is None or abilities is None or self._failure or self._stopped.is_set():
            raise EngineFailed(self._failure or "the engine is not running: start it first")
        if request.request_id in self._requests:
            raise RequestRefused(f"a request {request.request_id!r} is running already: ids must be unique")
        if len(self._requests) >= limits.max_batch_requests + self._settings.max_queued_requests:
            raise QueueFull(f"the engine's queue of {self._settings.max_queued_requests} requests is full")
        reason = sampling.refusal(
            request,
            self._vocabulary,
            max_model_len_tokens=limits.max_model_len_tokens,
            max_logprobs=self._settings.max_logprobs,
        ) or wire.refusal(request, abilities)
        if reason is not None:
            raise RequestRefused(reason)

    def _begin(self, running: AttachedRequest, cached_tokens: int | None = None) -> None:
        """Send a request, from where it stands. `cached_tokens`: None where the prefix index says it."""
        request = running.request
        if cached_tokens is None:
            cached_tokens = self.cached_tokens(request)
        running.cached_tokens = cached_tokens if running.tells_cached else None
        self._requests[request.request_id] = running
        context_tokens = len(request.prompt_token_ids) + len(request.emitted_token_ids)
        self._load.submitted(request.request_id, context_tokens, cached_tokens)
        self._stream_again(running)

    def _stream_again(self, running: AttachedRequest) -> None:
        running.serving = self._tasks.spawn(
            self._serve(running),
            name=running.request_id,
            on_error=lambda error: self._fail(running, repr(error)),
        )

    def _go_on(self, paused: EngineRequestState) -> None:
        """Submit a paused request again."""
        running = self._requests[paused.request_id]
        self._movable.exports.resumed(running)
        running.token_ids.clear()
        if running.is_aborted:
            self._end(running, FinishReason.ABORT)
        else:
            self._load.ended(running.request_id, self._clock.now_s())
            self._begin(running)

    async def _serve(self, running: AttachedRequest) -> None:
        """Stream a request, and begin again behind its last token where a stream breaks off while the server lives."""
        attempts = 0
        while running.request.request_id in self._requests:
            before = running.offset
            if attempts and (reason := wire.refusal(running.continued(), self._known_abilities)) is not None:
                return self._fail(running, reason, may_go_elsewhere=True)
            try:
                return await self._stream(running)
            except StreamError as error:
                if error.is_request:
                    if running.staged and self._moves is not None:
                        self._moves.unstage(running.staged)
                    return self._fail(running, error.reason)
                lost: EngineFailed = error
            except ServerLost as error:
                lost = error
            attempts = 1 if running.offset > before else attempts + 1
            if not await self._lives(str(lost)):
                return None
            if attempts >= _ATTEMPTS:
                return self._fail(running, str(lost))
            log.warning(
                "a stream is begun again", extra={"request_id": running.request.request_id, "reason": str(lost)}
            )
            await self._clock.sleep(_FIRST_PAUSE_S * 2 ** (attempts - 1))
        return None

    @property
    def _known_abilities(self) -> Abilities:
        assert self._abilities is not None, "started before it is asked"
        return self._abilities

    async def _stream(self, running: AttachedRequest) -> None:
        model, abilities = self._model, self._known_abilities
        assert model is not None, "started before it is asked"
        request = running.continued()
        context = [*request.prompt_token_ids, *request.emitted_token_ids]
        prompt = context if abilities.takes_tokens or self._text is None else self._text.decode(context)
        body = wire.completion_body(request, model.name, abilities, self._vocabulary, prompt)
        if abilities.is_vllm:
            # Another one for each stream: the server may not have noticed yet that the one before it has ended.
            body["request_id"] = f"{request.request_id}-{next(self._streams)}"
        headers = {"traceparent": request.traceparent} if request.traceparent else {}
        if self._moves is not None:
            body |= self._moves.begin(running, body["request_id"])
        try:
            async for data in self._client.stream("/v1/completions", body, headers):
                chunk = wire.parse_chunk(data, request.sampling)
                if chunk is None or running.request.request_id not in self._requests:
                    continue
                if chunk.finish_reason is FinishReason.ABORT:
                    raise ServerLost(f"{self.url} aborted the request")
                self._deliver(running, chunk)
                if chunk.finish_reason is not None:
                    return
        finally:
            if self._moves is not None:
                self._moves.ended(body["request_id"])
        if running.request.request_id in self._requests:
            raise ServerLost(f"{self.url} ended a stream without a reason")

    def _deliver(self, running: AttachedRequest, chunk: Chunk) -> None:
        token_ids = chunk.token_ids
        if self._text is not None and not token_ids:
            token_ids = self._text.encode(chunk.text)
        if chunk.finish_reason is FinishReason.ERROR:
            return self._fail(running, "the server ended the request with an error")
        delta = self._delta(running, token_ids, chunk)
        if token_ids:
            running.token_ids += token_ids
            running.offset += len(token_ids)
            running.cached_tokens, running.tells_cached = None, False
            self._load.produced(running.request.request_id, len(token_ids), self._clock.now_s())
        if chunk.finish_reason is not None:
            self._forget(running)
        if token_ids or chunk.finish_reason is not None:
            self._buffer.add(delta)
        if self._moves is not None:
            self._moves.exports.delivered(running)
        return None

    def _delta(self, running: AttachedRequest, token_ids: tuple[int, ...], chunk: Chunk) -> TokenDelta:
        return TokenDelta(
            request_id=running.request.request_id,
            offset=running.offset,
            token_ids=token_ids,
            logprobs=chunk.logprobs if len(chunk.logprobs) == len(token_ids) else (),
            finish_reason=chunk.finish_reason,
            cached_tokens=running.cached_tokens,
        )

    def _fail(self, running: AttachedRequest, reason: str, *, may_go_elsewhere: bool = False) -> None:
        self._end(running, FinishReason.ERROR, reason, may_go_elsewhere=may_go_elsewhere)

    def _end(
        self, running: AttachedRequest, reason: FinishReason, error: str = "", *, may_go_elsewhere: bool = False
    ) -> None:
        if self._forget(running):
            last = TokenDelta(running.request_id, running.offset, (), finish_reason=reason, error=error)
            self._buffer.add(replace(last, may_go_elsewhere=may_go_elsewhere))

    def _forget(self, running: AttachedRequest) -> bool:
        if self._requests.get(running.request.request_id) is not running:
            return False
        del self._requests[running.request.request_id]
        self._load.ended(running.request.request_id, self._clock.now_s())
        if self._moves is not None:
            self._moves.exports.ended(running)
        return True

    async def _lives(self, reason: str) -> bool:
        """Whether the server answers; if not, the engine fails."""
        try:
            await self._check_models()
        except EngineFailed as error:
            self._die(f"{error} (after: {reason})")
            return False
        return not self._failure

    async def _check_models(self) -> None:
        """Raises `EngineFailed` where it is not there, or has not the model that it had."""
        models = wire.served_models(await self._client.get("/v1/models"))
        if self._model not in models:
            had = self._model.name if self._model else ""
            names = ", ".join(f"{model.name} ({model.root})" for model in models)
            raise EngineFailed(f"{self.url} has not the model {had!r} any more as it was; it has {names or 'none'}")

    async def _watch(self) -> None:
        """Read the load, and notice when the server goes or is another one. Ends by failing the engine."""
        misses = polls = 0
        while not self._failure:
            await self._clock.sleep(self._settings.poll_s)
            polls += 1
            try:
                metrics = await self._metrics.read(self._core) if self._has_metrics else None
                if metrics is None or polls % _MODELS_EVERY == 0:
                    await self._check_models()
                if metrics is not None:
                    self._measured(metrics)
                misses = 0
            except ServerLost as error:
                misses += 1
                if misses >= _MISSES:
                    self._die(str(error))
            except StreamError as error:
                log.warning("the attached server does not say how it is", extra={"reason": str(error)})

    def _measured(self, metrics: ServerMetrics) -> None:
        if metrics.started_s != self._started_s:
            self._die(f"{self.url} was started anew")
        else:
            self._load.measured(metrics)

    def _die(self, reason: str) -> None:
        if not self._failure and not self._stopped.is_set():
            self._failure = reason
            log.error("the attached server is lost", extra={"reason": reason, "running_requests": len(self._requests)})
            self._buffer.close()
            if self._moves is not None:
                self._moves.fail(reason)
