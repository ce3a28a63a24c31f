"""The worker role: one engine, its streams to frontends and its reports to monitors."""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec
from prometheus_client import CollectorRegistry

from controlplane.model.adapter import StaticAdapter
from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState
from controlplane.model.media_facts import announced
from controlplane.model.pooling import GENERATE
from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, UNSET_RESCHEDULER, ReschedulerRecord
from engine_worker.adapter_follower import AdapterFollower
from engine_worker.checkpoint_source import is_hugging_face_id, locate_checkpoint
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.stages.coordinator import StageCoordinator
from engine_worker.decode_reporting import DecodeReporting
from engine_worker.engine_choice import ENGINES, identified, make_engine
from engine_worker.engines.host_tier import has_host_tier
from engine_worker.engines.interface import Engine, EngineLimits
from engine_worker.engines.lora import LoraEngine, serves_adapters
from engine_worker.engines.media import takes_media
from engine_worker.engines.movable import is_movable
from engine_worker.engines.pooling import is_pooling, pair_form
from engine_worker.engines.prefix import has_prefixes
from engine_worker.engines.served_metrics import ServerMetricsCollector, is_served
from engine_worker.engines.text import MISTRAL_MODE, has_text
from engine_worker.instance import Instance
from engine_worker.kv.addresses import reachable_address
from engine_worker.kv.service import serve_agent
from engine_worker.metrics import GaugeCollector, Gauges, WorkerMetrics
from engine_worker.parser_names import check_parser_names
from engine_worker.pooling import PoolingQueue
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.start import predict_lengths
from engine_worker.prefix_pull.prefix_puller import PrefixPuller
from engine_worker.reporter import Reporter
from engine_worker.sampling_defaults import sampling_defaults
from engine_worker.service import WorkerService
from engine_worker.settings import WorkerSettings
from engine_worker.step_watch import StepWatches
from engine_worker.transfer_watch import TransferWatch
from mesh.errors import ConfigurationError, EngineFailed, KvTransferRefused
from mesh.leadership_state import Fence
from mesh.role import RoleContext
from mesh.rpc.server import RpcServer
from mesh.runtime import Clock
from mesh.shutdown import Shutdown
from mesh.store.stored_setting import StoredSetting
from mesh.tasks import TaskSet
from mesh.text_files import TEKKEN, TextFiles, has_chat_template, read_text_files, text_hash
from penstock.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

TICK_S = 0.05
FLUSH_S = 1.0
"""How long frontends are given to read the end of their streams when the worker stops."""
TEMPLATE_MODES: Final = ("", "auto", "hf")
"""vLLM's tokenizer modes in which prompts are made by the chat template."""


class WorkerRole:
    """Starts the engine before anything is announced, so that a member of role `worker` is always ready."""

    name: ClassVar[str] = "worker"

    def __init__(
        self,
        settings: WorkerSettings,
        make_engine: Callable[[WorkerSettings, int, Clock], Engine] = make_engine,
    ) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._instance: Instance | None = None
        self._pooling: PoolingQueue | None = None
        """If the model is a pooling model."""
        self._coordinator: Coordinator | None = None
        self._stages: StageCoordinator | None = None
        self._puller: PrefixPuller | None = None
        self._reporter: Reporter | None = None
        self._prediction: PredictionLoop | None = None
        self._vital: tuple[asyncio.Task[None], ...] = ()
        self._tasks = TaskSet("worker")

    @property
    def instance(self) -> Instance | None:
        """The running instance; None before `start`."""
        return self._instance

    @property
    def engine(self) -> Engine | None:
        """The running engine; None before `start`."""
        return self._engine

    @property
    def coordinator(self) -> Coordinator | None:
        """Once it is started, if its requests can move."""
        return self._coordinator

    @property
    def stages(self) -> StageCoordinator | None:
        """Once it is started, if its requests can move."""
        return self._stages

    @property
    def puller(self) -> PrefixPuller | None:
        """Once it is started, if its engine's prefixes can be pulled."""
        return self._puller

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self.instance is not None:
            self.instance.table.validate()
        if self._engine is not None and serves_adapters(self._engine):
            self._engine.adapters.validate()
        if self._engine is not None and has_host_tier(self._engine) and self._engine.host_store is not None:
            self._engine.host_store.validate()
        if self._coordinator is not None:
            self._coordinator.validate()
        if self._stages is not None:
            self._stages.manager.validate()
        if self._puller is not None:
            self._puller.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Start the engine and serve it. Raises EngineFailed or ConfigurationError."""
        clock, threads = context.runtime.clock, context.runtime.threads
        started_s = clock.now_s()
        # Engines of one seed draw alike, so each incarnation has its own.
        seed = int(context.incarnation_id, 16) % 2**31
        if ENGINES.get(self._settings.engine).identify is not None:
            self._settings = await _unless_asked_to_end(identified(self._settings, clock), context.shutdown)
        if is_hugging_face_id(self._settings.model_path):
            self._settings = await threads.run(_fetched, self._settings)
        await threads.run(check_parser_names, self._settings.tool_call_parser, self._settings.reasoning_parser)
        self._settings = replace(self._settings, kv_host=self._settings.kv_host or context.bind_host)
        self._engine = self._make_engine(self._settings, seed, clock)
        limits = await self._engine.start()
        log.info("the engine is ready", extra={"start_s": round(clock.now_s() - started_s, 1)})
        made, text = await threads.run(
            _text_files, self._engine, limits.tokenizer_mode, Path(self._settings.model_path)
        )
        defaults = await threads.run(_defaults, self._settings)
        if defaults:
            log.info("requests that say nothing else are sampled as the model recommends", extra=dict(defaults))
        device = await threads.run(ENGINES.get(self._settings.engine).device)
        host_store = self._engine.host_store if has_host_tier(self._engine) else None
        disk_store = self._engine.disk_store if has_host_tier(self._engine) else None
        description = _describe(self._settings, context, limits, device)
        if host_store is not None:
            description = replace(description, host_store_id=host_store.store_id)
        description = _with_pulls(description, self._engine, self._settings)
        modules = await self._follow_adapters(self._engine, context)
        metrics = WorkerMetrics(context.registry)
        fence = Fence(lambda duty: metrics.refused_orders.labels(duty).inc())
        instance = Instance(self._engine, description, self._settings, metrics, clock.now_s, context.tracer)
        reporter = Reporter(instance, self._settings, metrics, context.runtime, host_store, disk_store)
        self._instance, self._reporter = instance, reporter
        steps = StepWatches(self._engine)
        transfers: TransferWatch | None = None
        if is_movable(self._engine):
            transfers = TransferWatch(instance, self._engine.kv_agent, clock)
            self._tasks.spawn(transfers.run(), name="transfers")
            self._coordinator = Coordinator(instance, self._engine, context, fence)
            self._stages = StageCoordinator(instance, self._coordinator, context, fence)
            self._stages.start()
            if has_prefixes(self._engine) and description.pulls_prefixes:
                self._puller = PrefixPuller(instance, self._engine, context, self._coordinator.peers.known, steps)
            engine = self._engine
            serve_agent(
                context.server,
                engine.kv_agent,
                lambda: reachable_address(engine.kv_address, context.bind_host, instance.description.address),
            )
        self._export(self._engine, metrics, lambda: _gauges(instance, reporter, transfers), context.registry)
        if is_pooling(self._engine):
            self._pooling = PoolingQueue(
                self._engine, self._settings.max_requests, lambda: instance.state is not InstanceState.READY
            )
        context.server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server,
            WorkerService(
                instance,
                clock.now_s,
                threads,
                self._coordinator,
                steps,
                device,
                fence,
                self._pooling,
                self._engine if takes_media(self._engine) else None,
                _lora(self._engine),
                made,
            ),
            "penstock.v1.Worker",
        )
        self._vital = (
            self._tasks.spawn(instance.run(), name="output"),
            self._tasks.spawn(_tick(instance, self._coordinator, self._stages, self._puller), name="tick"),
        )
        self._tasks.spawn(_follow_health(instance, context.server), name="health")
        reporter.start(context.directory, self._engine.kv_blocks())
        context.on_new_address.append(partial(_readdress, instance))
        apply = partial(_follow_rescheduler, reporter.decoding, self._stages)
        rescheduler = StoredSetting(context.store, RESCHEDULER_KEY, ReschedulerRecord, UNSET_RESCHEDULER, apply)
        self._tasks.spawn(rescheduler.follow(), name="rescheduler setting")
        self._prediction = predict_lengths(instance, self._engine, self._settings, context)
        self._tasks.spawn(self._prediction.run(), name="prediction")
        tasks = self._engine.pooling_tasks if is_pooling(self._engine) else (GENERATE,)
        return {
            "text_hash": text_hash(text),
            "sampling_defaults": json.dumps(defaults, sort_keys=True) if defaults else "",
            "tasks": ",".join(tasks),
            "pair_form": pair_form(self._engine),
            "media": announced(self._engine.media) if takes_media(self._engine) else "",
            "lora_modules": msgspec.json.encode(modules).decode() if modules else "",
            "http_url": limits.http_url,
            "data_parallel": str(limits.data_parallel),
            "tokenizer_mode": _announced_mode(limits.tokenizer_mode, text),
            **_attributes(description, self._settings),
        }

    def _export(
        self, engine: Engine, metrics: WorkerMetrics, read: Callable[[], Gauges], registry: CollectorRegistry
    ) -> None:
        """All that Prometheus reads of the instance."""
        GaugeCollector(read, registry, is_served=is_served(engine))
        if is_served(engine):
            ServerMetricsCollector(lambda: engine.server_metrics, self._settings.model, registry)
        else:
            metrics.export_as_vllm(self._settings.model)

    async def _follow_adapters(self, engine: Engine, context: RoleContext) -> tuple[StaticAdapter, ...]:
        """Returns the LoRA adapters that the worker is told to begin with, loaded."""
        if not serves_adapters(engine):
            return ()
        follower = AdapterFollower(engine, self._settings.model, context.store)
        modules = await follower.load_modules()
        self._tasks.spawn(follower.follow(), name="follow the adapters")
        self._tasks.spawn(follower.run(), name="adapters")
        return modules

    async def failed(self) -> None:
        """Raises EngineFailed when the engine dies."""
        await asyncio.wait(self._vital, return_when=asyncio.FIRST_COMPLETED)
        for task in self._vital:
            if task.done():
                task.result()

    async def drain(self) -> None:
        """Take nothing new, move what runs to other instances if there are any; return when the last request has
        ended or moved."""
        assert self._instance is not None, "drain() is called after start()"
        self._instance.start_draining()
        if self._coordinator is not None:
            self._coordinator.evacuate()
        await self._instance.drained()
        if self._pooling is not None:
            await self._pooling.drained()

    async def stop(self) -> None:
        """End what still runs with UNAVAILABLE, leave the monitors, end the engine and its processes."""
        if self._stages is not None:
            await self._stages.stop()
        if self._puller is not None:
            await self._puller.stop()
        if self._coordinator is not None:
            await self._coordinator.stop()
        if self._instance is not None:
            await self._instance.stop(FLUSH_S)
        if self._reporter is not None:
            await self._reporter.stop()
        await self._tasks.cancel()
        if self._prediction is not None:
            await self._prediction.stop()
        if self._engine is not None:
            await self._engine.stop()


def _lora(engine: Engine) -> LoraEngine | None:
    return engine if serves_adapters(engine) else None


async def _unless_asked_to_end(identifying: Coroutine[Any, Any, WorkerSettings], shutdown: Shutdown) -> WorkerSettings:
    """Raises `EngineFailed` if the process is to end before a server that is attached is there."""
    working = asyncio.ensure_future(identifying)
    asked = asyncio.ensure_future(shutdown.asked.wait())
    await asyncio.wait((working, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not working.done():
        working.cancel()
        await asyncio.wait((working,))
        raise EngineFailed("asked to end before there was an engine to serve with")
    return working.result()


def _follow_rescheduler(
    decoding: DecodeReporting, stages: StageCoordinator | None, record: ReschedulerRecord, revision: int
) -> None:
    """Raises `ConfigurationError`."""
    decoding.configure(record, revision)
    if stages is not None:
        stages.rescheduled(decoding.interval_s is not None)


async def _tick(
    instance: Instance, coordinator: Coordinator | None, stages: StageCoordinator | None, puller: PrefixPuller | None
) -> None:
    while True:
        instance.tick()
        if puller is not None:
            puller.tick()
        if coordinator is not None:
            coordinator.tick()
        if stages is not None:
            stages.tick()
        await asyncio.sleep(TICK_S)


def _readdress(instance: Instance, address: str) -> None:
    instance.description = replace(instance.description, address=address)


async def _follow_health(instance: Instance, server: RpcServer) -> None:
    """NOT_SERVING while the engine hangs; a draining worker stays so, hang or not."""
    changed = asyncio.Event()
    instance.on_hang_change.append(changed.set)
    while True:
        await changed.wait()
        changed.clear()
        await server.set_serving(not instance.hung and instance.state is InstanceState.READY)


def _fetched(settings: WorkerSettings) -> WorkerSettings:
    """With the directory of a model of the Hub. Raises ConfigurationError."""
    needs_weights = ENGINES.get(settings.engine).needs_weights
    return replace(settings, model_path=str(locate_checkpoint(settings.model_path, with_weights=needs_weights)))


def _defaults(settings: WorkerSettings) -> Mapping[str, Any]:
    return sampling_defaults(Path(settings.model_path), settings.generation_config, settings.override_generation_config)


def _attributes(description: InstanceDescription, settings: WorkerSettings) -> dict[str, str]:
    """What a worker announces of its instance. Frontends act on what it says of text."""
    return {
        "model": description.model,
        "model_path": description.model_path,
        "engine": description.engine,
        "block_tokens": str(description.block_tokens),
        "max_model_len_tokens": str(description.max_model_len_tokens),
        "tool_call_parser": settings.tool_call_parser if settings.enable_auto_tool_choice else "",
        "reasoning_parser": settings.reasoning_parser,
        "phase": description.phase.value,
        "tensor_parallel": str(description.tensor_parallel),
        "pipeline_parallel": str(description.pipeline_parallel),
        "max_loras": str(description.max_loras),
    }


def _with_pulls(description: InstanceDescription, engine: Engine, settings: WorkerSettings) -> InstanceDescription:
    """With what is to be said of its cached prefixes, if others can pull them."""
    if not has_prefixes(engine) or not settings.prefix_pull:
        return description
    try:
        engine.kv_agent()
    except (ConfigurationError, KvTransferRefused):  # the engine has said why
        return description
    token_bytes = engine.kv_block_bytes // description.block_tokens
    return replace(description, kv_token_bytes=token_bytes, pulls_prefixes=True)


def _describe(settings: WorkerSettings, context: RoleContext, limits: EngineLimits, device: str) -> InstanceDescription:
    return InstanceDescription(
        instance_id=context.member_id,
        incarnation_id=context.incarnation_id,
        address=context.address,
        model=settings.model,
        model_path=settings.model_path,
        engine=limits.label or settings.engine,
        block_tokens=limits.block_tokens,
        kv_blocks=limits.kv_blocks,
        max_model_len_tokens=limits.max_model_len_tokens,
        max_batch_requests=limits.max_batch_requests,
        max_step_tokens=limits.max_step_tokens,
        phase=InstancePhase(settings.phase),
        tensor_parallel=limits.tensor_parallel,
        pipeline_parallel=limits.pipeline_parallel,
        device=device,
        max_loras=limits.max_loras,
    )


def _text_files(engine: Engine, mode: str, directory: Path) -> tuple[TextFiles, TextFiles]:
    """What the checkpoint lacks for frontends, as far as the engine knows it, and with that all that they get; blocks.
    Raises ConfigurationError."""
    read = read_text_files(directory)
    is_whole = "tokenizer.json" in read and (mode != MISTRAL_MODE or has_chat_template(read))
    if is_whole:
        return {}, read
    made = dict(engine.text_files(read)) if has_text(engine) else {}
    if mode == MISTRAL_MODE and (directory / TEKKEN).is_file():
        made[TEKKEN] = (directory / TEKKEN).read_bytes()
    if made:
        log.info("the checkpoint has no files that frontends read; made of vLLM's tokenizer", extra={"files": [*made]})
    return made, {**read, **made}


def _announced_mode(mode: str, text: TextFiles) -> str:
    """Empty where frontends make prompts by the chat template."""
    return "" if mode in TEMPLATE_MODES or (mode == MISTRAL_MODE and TEKKEN not in text) else mode


def _gauges(instance: Instance, reporter: Reporter, transfers: TransferWatch | None) -> Gauges:
    disk = reporter.disk_store
    return Gauges(
        model=instance.description.model,
        load=instance.last_load,
        kv_blocks=instance.description.kv_blocks,
        block_tokens=instance.description.block_tokens,
        max_model_len_tokens=instance.description.max_model_len_tokens,
        cached_blocks=len(reporter.ledger.blocks),
        host_blocks=0 if reporter.host_store is None else len(reporter.host_store),
        disk_blocks=0 if disk is None else len(disk),
        disk_evictions=0 if disk is None else disk.evictions_total,
        disk_corrupt=0 if disk is None else disk.corrupt_total,
        host_evictions=0 if reporter.host_store is None else reporter.host_store.evictions_total,
        host_corrupt=0 if reporter.host_store is None else reporter.host_store.corrupt_total,
        pulling_requests=0 if instance.pulls is None else len(instance.pulls),
        streams=len(instance.streams),
        hung=instance.hung,
        is_immovable=bool(instance.transfer_obstacle),
        transfers=transfers.status if transfers is not None else None,
    )
