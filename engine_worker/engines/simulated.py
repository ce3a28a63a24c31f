"""The engine without weights: the simulator's instance model under a real clock."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace

from msgspec import structs

from controlplane.model.adapter import Adapter
from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.media import ExpandedPrompt, PromptMedia
from controlplane.model.media_facts import MediaFacts
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, StepOutput, TokenDelta
from controlplane.model.step_sample import StepSample
from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.media import check_expanded
from engine_worker.engines.simulated_host_tier import SimulatedHostTier
from engine_worker.engines.simulated_lora import SimulatedAdapters
from engine_worker.engines.simulated_media import TEXT_ONLY, SimulatedMedia
from engine_worker.engines.simulated_pace import Pace, steady
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.disk_tier import DiskTier
from engine_worker.host_tier.settings import NO_HOST_TIER, OF_THIS_MACHINE, HostStores, HostTierSettings
from engine_worker.host_tier.store import HostStore
from mesh.errors import ConfigurationError, EngineFailed, HostTierUnavailable, QueueFull, RequestRefused
from mesh.mailbox import Mailbox
from mesh.runtime import Clock
from mesh.tasks import TaskSet
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.config import InstanceConfig
from simulator.instance.instance import SimulatedInstance
from simulator.instance.script import without_effect

_log = logging.getLogger(__name__)

_SHORTEST_SLEEP_S = 0.001
"""Sleeps below what a timer can do are saved up until they reach this."""
_MOST_LAG_S = 0.2
"""Delay that is caught up by faster steps; what is more is given up, loudly."""
_LAG_WARNING_EVERY_S = 10.0
_MOST_UNREAD_STEPS = 1024
_MOST_UNREAD_KV_CHANGES = 1024


class SimulatedEngine:
    """An `Engine` (see `interface`) that takes the time of a real one and says deterministic things.

    `time_scale` multiplies every duration: 0.1 is ten times as fast as the cost model. Steps end at absolute
    deadlines, so late timers do not add up. The parallel degrees are what the engine says of itself: its costs are
    those of `cost`, however many GPUs they stand for.
    """

    def __init__(
        self,
        config: InstanceConfig,
        cost: CostModel,
        clock: Clock,
        *,
        time_scale: float = 1.0,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        tokenizer_mode: str = "",
        media: SimulatedMedia = TEXT_ONLY,
        lora: SimulatedAdapters | None = None,
        host: HostTierSettings = NO_HOST_TIER,
        stores: HostStores = OF_THIS_MACHINE,
        pace: Pace = steady,
    ) -> None:
        """`stores`: of its host, if it has one; `pace`: asked before each step, whose duration it multiplies too."""
        if time_scale <= 0:
            raise ConfigurationError(f"time_scale must be more than 0, got {time_scale}")
        if tensor_parallel < 1 or pipeline_parallel < 1:
            raise ConfigurationError(
                f"parallel degrees must be at least 1, got tensor_parallel={tensor_parallel} and "
                f"pipeline_parallel={pipeline_parallel}"
            )
        self._degrees = tensor_parallel, pipeline_parallel
        self._tokenizer_mode = tokenizer_mode
        self._media = media
        self._lora = lora or SimulatedAdapters(0, 0, clock.now_s)
        self.adapters = self._lora.cache
        """See `LoraEngine`."""
        self._cost = _SeenCost(cost)
        self.instance = SimulatedInstance(config, self._cost)
        """Open to the KV transfer agent, which shares the engine's event loop."""
        self._time_scale = time_scale
        self._pace, self._last_pace = pace, 1.0
        self._clock = clock
        self._outputs: Mailbox[StepOutput] = Mailbox()
        self._kv_blocks: Mailbox[KvBlocks] = Mailbox()
        self._work = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._failure: EngineFailed | None = None
        self._ignored: set[str] = set()
        """Names of sampling parameters that requests set in vain; at most as many as there are."""
        self._warned_at = -_LAG_WARNING_EVERY_S
        self._observe: Callable[[StepSample], None] | None = None
        self._host_settings = host
        self._stores = stores
        self._host: SimulatedHostTier | None = None
        self._host_tasks = TaskSet("simulated host tier")
        self._engine_hit_tokens = self._host_hit_tokens = self._disk_hit_tokens = 0

    async def start(self) -> EngineLimits:
        """Start the task that takes steps; returns the limits of the configuration. Raises `EngineFailed` if called
        twice."""
        if self._runner is not None:
            raise EngineFailed("the engine was started already; make a new one")
        if self._host_settings.nbytes:
            self._start_host_tier()
        self._runner = asyncio.create_task(self._run(), name="simulated-engine")
        config = self.instance.config
        tensor_parallel, pipeline_parallel = self._degrees
        return EngineLimits(
            block_tokens=config.block_tokens,
            kv_blocks=config.kv_blocks,
            max_model_len_tokens=config.max_model_len_tokens,
            max_batch_requests=config.max_batch_requests,
            max_step_tokens=config.max_step_tokens,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            max_loras=self.adapters.slots,
            tokenizer_mode=self._tokenizer_mode,
        )

    def submit(self, request: EngineRequest) -> None:
        """Queue a request for the next step."""
        if self._failure is not None:
            raise self._failure
        if self._runner is None or self._runner.done():
            raise EngineFailed("the engine is not running; start it before submitting")
        self._check_media(request)
        self._lora.use(request.request_id, request.adapter, self._request_ids)
        if self._host is None or not self._begin_load(request, self._host):
            self.instance.submit(request)
        self._warn_of_ignored(request.sampling)
        self.wake()

    @property
    def media(self) -> Mapping[str, MediaFacts]:
        """See `MediaEngine`."""
        return self._media.facts

    async def expand(self, media: PromptMedia) -> ExpandedPrompt:
        """See `MediaEngine`."""
        return self._media.expand(media)

    def abort(self, request_id: str) -> None:
        """End a request now; a step under way no longer brings it a token."""
        if self._host is not None and (waited := self._host.cancel(request_id)) is not None:
            delta: TokenDelta | None = _aborted(waited)
        else:
            delta = self.instance.abort(request_id)
        if delta is not None:
            self._outputs.put(StepOutput(deltas=(delta,)))
            self.wake()

    def wake(self) -> None:
        """The instance may have work: to be called after `instance.complete_import`."""
        self._work.set()

    def outputs(self) -> AsyncIterator[StepOutput]:
        """Yields one message for each step that brought tokens or ends."""
        return self._outputs.read()

    def load(self) -> LoadReport:
        """The load now, with durations as the clock shows them."""
        load, scale = self.instance.load(), self._time_scale * self._last_pace
        if self.adapters.slots:
            load = structs.replace(load, adapters=self._lora.report(self._request_ids))
        load = structs.replace(
            load,
            engine_hit_tokens_total=self._engine_hit_tokens,
            host_hit_tokens_total=self._host_hit_tokens,
            disk_hit_tokens_total=self._disk_hit_tokens,
        )
        if (host := self._host) is not None:
            load = structs.replace(
                load,
                queued_requests=load.queued_requests + len(host.loading),
                queued_prefill_tokens=load.queued_prefill_tokens + host.waiting_prefill_tokens,
                host_load_token_ms=host.load_token_ms,
            )
        if scale == 1.0:
            return load
        return structs.replace(load, step_ms=load.step_ms * scale, token_interval_ms=load.token_interval_ms * scale)

    @property
    def lora_modules(self) -> tuple[Adapter, ...]:
        """See `LoraEngine`."""
        return self._lora.modules

    async def load_adapter(self, adapter: Adapter, *, may_evict: bool = True) -> Adapter:
        """See `LoraEngine`."""
        return self._lora.load(adapter, may_evict=may_evict)

    async def unload_adapter(self, digest: str) -> None:
        """See `LoraEngine`."""
        self.adapters.keep_only(self._request_ids)
        self._lora.unload(digest)

    def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """Yields changes of the prefix cache."""
        return self._kv_blocks.read()

    def watch_steps(self, observe: Callable[[StepSample], None] | None) -> None:
        """See `StepSource`; durations are as the clock shows them."""
        self._observe = observe

    async def stop(self) -> None:
        """End every request and the stepping."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.gather(self._runner, return_exceptions=True)
        for request_id in self._request_ids:
            self.abort(request_id)
        await self._host_tasks.cancel()
        if self._host is not None:
            self._host.store.close()
            if self._host.disk is not None:
                self._host.disk.store.close()
        self._outputs.close()
        self._kv_blocks.close()

    @property
    def host_store(self) -> HostStore | None:
        """See `HostTierEngine`."""
        return None if self._host is None else self._host.store

    @property
    def disk_store(self) -> DiskStore | None:
        """See `HostTierEngine`."""
        return None if self._host is None or self._host.disk is None else self._host.disk.store

    @property
    def _request_ids(self) -> tuple[str, ...]:
        """All that have not ended."""
        return self.instance.request_ids + (self._host.loading if self._host is not None else ())

    def _start_host_tier(self) -> None:
        config = self.instance.config
        try:
            store = self._stores.open(f"simulated/{config.block_tokens}", config.block_bytes, self._host_settings)
        except HostTierUnavailable as error:
            _log.error("there is no host tier", extra={"error": str(error)})
            return
        disk_store = self._stores.open_disk(f"simulated/{config.block_tokens}", config.block_bytes, self._host_settings)
        disk = None if disk_store is None else DiskTier(store, disk_store, self._clock, self._stores.threads)
        self._host = SimulatedHostTier(
            self.instance, store, self._clock, self._host_tasks, self._submit_loaded, disk, time_scale=self._time_scale
        )
        self._host_tasks.spawn(self._host.save(), name="save")
        if disk is not None:
            self._host_tasks.spawn(disk.save(), name="save to disk")

    def _begin_load(self, request: EngineRequest, host: SimulatedHostTier) -> bool:
        """Whether the request waits for blocks of the host first. Raises as `submit`."""
        if request.request_id in host.loading:
            raise RequestRefused(f"request {request.request_id}: this id is in use; choose another")
        queued, limit = (
            self.instance.load().queued_requests + len(host.loading),
            self.instance.config.max_queued_requests,
        )
        if queued >= limit:
            raise QueueFull(f"request {request.request_id}: the queue of {limit} is full; try another instance")
        return request.request_id not in self.instance.request_ids and host.begin(request)

    def _submit_loaded(self, request: EngineRequest) -> None:
        try:
            self.instance.submit(request)
        except RequestRefused as error:
            last = TokenDelta(request.request_id, len(request.emitted_token_ids), (), finish_reason=FinishReason.ERROR)
            self._outputs.put(StepOutput(deltas=(replace(last, error=str(error), may_go_elsewhere=True),)))
        self.wake()

    def _count_hits(self, deltas: tuple[TokenDelta, ...]) -> None:
        for delta in deltas:
            if delta.cached_tokens is not None:
                loaded, of_disk = (0, 0) if self._host is None else self._host.take_loaded_tokens(delta.request_id)
                loaded = min(loaded, delta.cached_tokens)
                of_disk = min(of_disk, loaded)
                self._disk_hit_tokens += of_disk
                self._host_hit_tokens += loaded - of_disk
                self._engine_hit_tokens += delta.cached_tokens - loaded

    def _check_media(self, request: EngineRequest) -> None:
        """Raises RequestRefused."""
        if request.media is not None:
            check_expanded(request.prompt_token_ids, request.media, self._media.expand(request.media))

    def _warn_of_ignored(self, sampling: SamplingParams) -> None:
        """Once for each parameter: what has no effect says so."""
        for name in without_effect(sampling):
            if name not in self._ignored:
                self._ignored.add(name)
                _log.warning("a simulated engine does not honour this sampling parameter", extra={"parameter": name})

    async def _run(self) -> None:
        try:
            await self._take_steps()
        except Exception as error:  # noqa: BLE001  whatever it was, the mesh must hear of it
            _log.exception("the simulated engine died")
            self._failure = EngineFailed(f"the simulated engine died: {error!r}; restart the worker")
            self._outputs.close(self._failure)
            self._kv_blocks.close(self._failure)

    async def _take_steps(self) -> None:
        ends_at_s = self._clock.now_s()
        while True:
            self._work.clear()
            step = self.instance.plan_step(ends_at_s * 1e3 / self._time_scale)
            if step is None:
                await self._work.wait()
                ends_at_s = self._clock.now_s()
                continue
            shape = self._cost.shape
            self._last_pace = self._pace()
            ends_at_s += step.duration_ms * 1e-3 * self._time_scale * self._last_pace
            ends_at_s = await self._sleep_until(ends_at_s)
            result = self.instance.finish_step(step)
            if self._observe is not None:
                self._observe(_sample(shape, step.duration_ms * self._time_scale * self._last_pace))
            self._count_hits(result.deltas)
            if result.deltas and (deltas := self._answered(result.deltas)):
                self._outputs.put(StepOutput(deltas=deltas))
            self._after_step()
            self._tell_kv_changes(result.kv_blocks)
            if len(self._outputs) >= _MOST_UNREAD_STEPS:
                await self._outputs.below(_MOST_UNREAD_STEPS)

    def _after_step(self) -> None:
        """Between two steps, with the output of the first one told; for engines built on this one."""

    def _answered(self, deltas: tuple[TokenDelta, ...]) -> tuple[TokenDelta, ...]:
        """What the output of a step tells of these; for engines built on this one."""
        return deltas

    async def _sleep_until(self, deadline_s: float) -> float:
        """Sleep to the deadline; returns it, moved on if the process is too late to catch up."""
        ahead_s = deadline_s - self._clock.now_s()
        await self._clock.sleep(ahead_s if ahead_s >= _SHORTEST_SLEEP_S else 0.0)
        now_s = self._clock.now_s()
        lag_s = now_s - deadline_s
        if lag_s <= _MOST_LAG_S:
            return deadline_s
        if now_s - self._warned_at >= _LAG_WARNING_EVERY_S:
            self._warned_at = now_s
            _log.warning("the simulated engine is %.0f ms late; this machine cannot keep its time", lag_s * 1e3)
        return now_s

    def _tell_kv_changes(self, changes: KvBlocks) -> None:
        if not changes.stored and not changes.removed:
            return
        if self._host is not None:
            self._host.stored(changes.stored)
        if len(self._kv_blocks) < _MOST_UNREAD_KV_CHANGES:
            self._kv_blocks.put(changes)
        else:
            self._kv_blocks.replace_all(KvBlocks(stored=self.instance.cached_hashes, cleared=True))


def _aborted(request: EngineRequest) -> TokenDelta:
    return TokenDelta(request.request_id, len(request.emitted_token_ids), (), finish_reason=FinishReason.ABORT)


class _SeenCost(CostModel):
    """A cost model that remembers the batch it was asked about last."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self.shape = BatchShape()

    def step_ms(self, batch: BatchShape) -> float:
        self.shape = batch
        return self._cost.step_ms(batch)


def _sample(shape: BatchShape, duration_ms: float) -> StepSample:
    chunks = shape.prefill
    return StepSample(
        duration_ms=duration_ms,
        prefill_tokens=sum(chunk.new_tokens for chunk in chunks),
        attended_pairs=sum(chunk.new_tokens * (chunk.context_tokens + (chunk.new_tokens + 1) / 2) for chunk in chunks),
        decode_requests=shape.decode_requests,
        context_tokens=shape.decode_context_tokens_sum,
        longest_context_tokens=int(shape.decode_context_tokens.max()) if shape.decode_requests else 0,
    )
