"""The worker role: one engine, its streams to frontends and its reports to monitors."""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from controlplane.model.instance import InstanceDescription, InstancePhase, InstanceState
from controlplane.model.pooling import GENERATE
from controlplane.policies.rescheduling.parameters import ReschedulerMode
from controlplane.policies.rescheduling.record import RESCHEDULER_KEY, ReschedulerRecord
from engine_worker.checkpoint_source import is_hugging_face_id, locate_checkpoint
from engine_worker.coordinator.coordinator import Coordinator
from engine_worker.coordinator.stages.coordinator import StageCoordinator
from engine_worker.engine_choice import ENGINES, make_engine
from engine_worker.engines.interface import Engine, EngineLimits
from engine_worker.engines.movable import is_movable
from engine_worker.engines.pooling import is_pooling
from engine_worker.instance import Instance
from engine_worker.kv.service import serve_agent
from engine_worker.metrics import GaugeCollector, Gauges, WorkerMetrics
from engine_worker.pooling import PoolingQueue
from engine_worker.prediction.loop import PredictionLoop
from engine_worker.prediction.start import predict_lengths
from engine_worker.reporter import Reporter
from engine_worker.sampling_defaults import sampling_defaults
from engine_worker.service import WorkerService
from engine_worker.settings import WorkerSettings
from engine_worker.step_watch import StepWatches
from engine_worker.transfer_watch import TransferWatch
from mesh.leadership_state import Fence
from mesh.membership import MemberChange
from mesh.role import RoleContext
from mesh.rpc.server import RpcServer
from mesh.runtime import Clock
from mesh.store.stored_setting import StoredSetting
from mesh.tasks import TaskSet
from mesh.text_files import read_text_files, text_hash
from penstock.v1 import worker_pb2_grpc

log = logging.getLogger(__name__)

TICK_S = 0.05
FLUSH_S = 1.0
"""How long frontends are given to read the end of their streams when the worker stops."""


UNSET_RESCHEDULER = ReschedulerRecord(ReschedulerMode.CURRENT)
"""What workers report for while the mesh has no setting: a scheduler may have one of its own."""


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
        self._reporter: Reporter | None = None
        self._prediction: PredictionLoop | None = None
        self._vital: tuple[asyncio.Task[None], ...] = ()
        self._unsubscribe: Callable[[], None] = lambda: None
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

    def validate(self) -> None:
        """Check what must hold of its state between two events. Raises `InvariantBroken`."""
        if self.instance is not None:
            self.instance.table.validate()
        if self._coordinator is not None:
            self._coordinator.validate()
        if self._stages is not None:
            self._stages.manager.validate()

    async def start(self, context: RoleContext) -> Mapping[str, str]:
        """Start the engine and serve it. Raises EngineFailed or ConfigurationError."""
        clock, threads = context.runtime.clock, context.runtime.threads
        started_s = clock.now_s()
        # Engines of one seed draw alike, so each incarnation has its own.
        seed = int(context.incarnation_id, 16) % 2**31
        if is_hugging_face_id(self._settings.model_path):
            self._settings = await threads.run(_fetched, self._settings)
        self._engine = self._make_engine(self._settings, seed, clock)
        limits = await self._engine.start()
        log.info("the engine is ready", extra={"start_s": round(clock.now_s() - started_s, 1)})
        text = await threads.run(read_text_files, Path(self._settings.model_path))
        defaults = await threads.run(_defaults, self._settings)
        if defaults:
            log.info("requests that say nothing else are sampled as the model recommends", extra=dict(defaults))
        description = _describe(self._settings, context, limits)
        metrics = WorkerMetrics(context.registry)
        fence = Fence(lambda duty: metrics.refused_orders.labels(duty).inc())
        instance = Instance(self._engine, description, self._settings, metrics, clock.now_s, context.tracer)
        reporter = Reporter(instance, self._settings, metrics, context.runtime)
        self._instance, self._reporter = instance, reporter
        transfers: TransferWatch | None = None
        if is_movable(self._engine):
            transfers = TransferWatch(instance, self._engine.kv_agent, clock)
            self._tasks.spawn(transfers.run(), name="transfers")
            self._coordinator = Coordinator(instance, self._engine, context, fence)
            self._stages = StageCoordinator(instance, self._coordinator, context, fence)
            self._stages.start()
            serve_agent(context.server, self._engine.kv_agent, lambda: instance.description.address)
        GaugeCollector(lambda: _gauges(instance, reporter, transfers), context.registry)
        if is_pooling(self._engine):
            self._pooling = PoolingQueue(
                self._engine, self._settings.max_requests, lambda: instance.state is not InstanceState.READY
            )
        device = await threads.run(ENGINES.get(self._settings.engine).device)
        context.server.add(
            worker_pb2_grpc.add_WorkerServicer_to_server,
            WorkerService(
                instance,
                clock.now_s,
                threads,
                self._coordinator,
                StepWatches(self._engine),
                device,
                fence,
                self._pooling,
            ),
            "penstock.v1.Worker",
        )
        self._vital = (
            self._tasks.spawn(instance.run(), name="output"),
            self._tasks.spawn(_tick(instance, self._coordinator, self._stages), name="tick"),
        )
        self._tasks.spawn(_follow_health(instance, context.server), name="health")
        reporter.start(context.directory, self._engine.kv_blocks())
        self._unsubscribe = context.directory.subscribe(lambda change: _follow_own(context, instance, change))
        rescheduler = StoredSetting(
            context.store, RESCHEDULER_KEY, ReschedulerRecord, UNSET_RESCHEDULER, reporter.decoding.configure
        )
        self._tasks.spawn(rescheduler.follow(), name="rescheduler setting")
        self._prediction = predict_lengths(instance, self._engine, self._settings, context)
        self._tasks.spawn(self._prediction.run(), name="prediction")
        tasks = self._engine.pooling_tasks if is_pooling(self._engine) else (GENERATE,)
        return {
            "text_hash": text_hash(text),
            "sampling_defaults": json.dumps(defaults, sort_keys=True) if defaults else "",
            "tasks": ",".join(tasks),
            **_attributes(description, self._settings),
        }

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
        self._unsubscribe()
        if self._stages is not None:
            await self._stages.stop()
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


async def _tick(instance: Instance, coordinator: Coordinator | None, stages: StageCoordinator | None) -> None:
    while True:
        instance.tick()
        if coordinator is not None:
            coordinator.tick()
        if stages is not None:
            stages.tick()
        await asyncio.sleep(TICK_S)


def _follow_own(context: RoleContext, instance: Instance, change: MemberChange) -> None:
    if context.is_own(change.member):
        instance.description = replace(instance.description, address=change.member.address)


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
        "tool_call_parser": (settings.tool_call_parser or "") if settings.enable_auto_tool_choice else "",
        "reasoning_parser": settings.reasoning_parser or "",
        "phase": description.phase.value,
        "tensor_parallel": str(description.tensor_parallel),
        "pipeline_parallel": str(description.pipeline_parallel),
    }


def _describe(settings: WorkerSettings, context: RoleContext, limits: EngineLimits) -> InstanceDescription:
    return InstanceDescription(
        instance_id=context.member_id,
        incarnation_id=context.incarnation_id,
        address=context.address,
        model=settings.model,
        model_path=settings.model_path,
        engine=settings.engine,
        block_tokens=limits.block_tokens,
        kv_blocks=limits.kv_blocks,
        max_model_len_tokens=limits.max_model_len_tokens,
        max_batch_requests=limits.max_batch_requests,
        max_step_tokens=limits.max_step_tokens,
        phase=InstancePhase(settings.phase),
        tensor_parallel=limits.tensor_parallel,
        pipeline_parallel=limits.pipeline_parallel,
    )


def _gauges(instance: Instance, reporter: Reporter, transfers: TransferWatch | None) -> Gauges:
    return Gauges(
        model=instance.description.model,
        load=instance.last_load,
        kv_blocks=instance.description.kv_blocks,
        cached_blocks=len(reporter.ledger.blocks),
        streams=len(instance.streams),
        hung=instance.hung,
        transfers=transfers.status if transfers is not None else None,
    )
