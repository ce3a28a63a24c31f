"""Runs one timeline, or many seeds over several processes."""

import asyncio
import hashlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from controlplane.scheduler.settings import SchedulerSettings
from fault_simulation.actions import SetCascade
from fault_simulation.aftermath import PROBE_S, PROBED_S, leftovers, probe, task_names
from fault_simulation.background import BackgroundClient
from fault_simulation.draws import draw
from fault_simulation.faults import Breaker
from fault_simulation.invariants import SAMPLED_EVERY_S, Violation, Watch
from fault_simulation.loop import SimulationStuck
from fault_simulation.nodes import DRAIN_S, HTTP_PORT, SimulatedMesh
from fault_simulation.supervised import UpSettings
from fault_simulation.timeline import (
    ADAPTERS,
    CASCADE,
    FIRST_REQUEST_S,
    HEALED_S,
    JUDGED_S,
    LARGE,
    MODEL,
    STORE,
    DeleteKeys,
    Timeline,
    Topology,
    Wipe,
)
from fault_simulation.workload import (
    MODEL_OPTIONS,
    MODEL_PATH,
    MODEL_TOKENS,
    Asked,
    Workload,
    adapter_path,
    worker_settings,
)
from mesh.parent_death import end_with_parent
from services.cli.supervisor.local_mesh import LocalMesh, ModelSpec, PhaseCounts
from services.frontend.settings import FrontendSettings
from simulator.instance.config import InstanceConfig

ENDED_S: Final = HEALED_S + 42.0
"""When the last request is to have ended: those that waited for a frontend all this time come at once."""
MAX_INDEXED_BLOCKS: Final = 16_384
"""More than all workers can hold. The table of the default, 2 million, takes a tenth of a seed's CPU."""
QUIET_S: Final = 6.0
"""In which what is left of the last requests has to go."""
QUIET_EVERY_S: Final = 0.25
USUAL_BEFORE_S: Final = (0.21, 0.11, 0.01)
"""Before the first request, when it is looked what runs: at one moment alone, some of what comes and goes is away."""
TIME_SCALE: Final = 2.5
"""Of the engines: fewer steps, and requests that live through more."""
FIRST_THRESHOLD: Final = 70.0
"""Of the cascade: some answers of the small model are good enough."""
SEEDS_PER_PROCESS: Final = 250


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a timeline."""

    seed: int
    violations: tuple[Violation, ...]
    digest: str
    """Of every frame, when it arrived and where, and of every answer."""
    virtual_s: float
    cpu_s: float
    asked: tuple[Asked, ...] = field(default=(), compare=False, repr=False)

    @property
    def kinds(self) -> frozenset[str]:
        """Of its violations."""
        return frozenset(violation.kind for violation in self.violations)


def run_seed(seed: int) -> Outcome:
    """The timeline of a seed."""
    return run_timeline(draw(seed))


def run_timeline(timeline: Timeline, mesh: SimulatedMesh | None = None) -> Outcome:
    """Simulate it. `mesh` is one of `build`, for those who want to look on."""
    began_s = time.process_time()
    mesh = mesh or build(timeline)
    watch = Watch(
        mesh,
        timeline.topology.models,
        may_lose_workers=bool(timeline.faults or timeline.operations),
        may_lose_settings=loses_settings(timeline),
    )

    def polls(asked: Asked, frontends: Sequence[str]) -> Coroutine[Any, Any, None]:
        return BackgroundClient(mesh, asked, watch.promises, watch.violated).run(frontends, watch.attempt_ended)

    workload = Workload(mesh, timeline, watch.attempt_ended, polls)
    try:
        mesh.run(_live(mesh, timeline, watch, workload), limit_s=2 * ENDED_S)
    except SimulationStuck as stuck:
        watch.violated("stuck", "the simulation", str(stuck))
    for finding in mesh.loop.findings:
        watch.violated(f"finding: {finding.what}", finding.node.rpartition("-")[0] or finding.node, str(finding))
    return Outcome(
        timeline.seed,
        tuple(watch.violations),
        _digest(mesh, workload.asked),
        mesh.loop.now_s,
        time.process_time() - began_s,
        tuple(workload.asked),
    )


def build(timeline: Timeline) -> SimulatedMesh:
    """The machines of a timeline, nothing started yet."""
    mesh, topology = SimulatedMesh(timeline.seed), timeline.topology
    mesh.is_framed = topology.framed
    if topology.supervised:
        mesh.add_supervisor(_up_settings(topology))
        return mesh
    for name in topology.monitor_ids:
        mesh.add_monitor(name)
    for name in topology.scheduler_ids:
        mesh.add_scheduler(
            name,
            SchedulerSettings(topology.policy, rescheduler=topology.rescheduler, max_indexed_blocks=MAX_INDEXED_BLOCKS),
        )
    for name in topology.router_ids:
        mesh.add_cascade(name)
    for name in topology.planner_ids:
        mesh.add_planner(name)
    for name in topology.predictor_ids:
        mesh.add_predictor(name)
    for name, model, phase in topology.workers:
        mesh.add_worker(
            name,
            worker_settings(
                model, (*_engine_args(topology), *_lora_args(topology, model)), phase, bounces=topology.framed
            ),
        )
    for name in topology.frontend_ids:
        wait_s = topology.instance_wait_s
        mesh.add_frontend(name, FrontendSettings(http_host=name, http_port=HTTP_PORT, instance_wait_s=wait_s))
    return mesh


def loses_settings(timeline: Timeline) -> bool:
    """Whether the store may lose what nobody announces again."""
    return any(isinstance(fault, (Wipe, DeleteKeys)) for fault in timeline.faults)


def _engine_args(topology: Topology) -> tuple[str, ...]:
    host = (
        (f"host_kv_bytes={topology.host_kv_blocks * InstanceConfig().block_bytes}",) if topology.host_kv_blocks else ()
    )
    disk = (f"disk_kv={topology.disk_kv_blocks * InstanceConfig().block_bytes}",) if topology.disk_kv_blocks else ()
    return f"instance.kv_blocks={topology.kv_blocks}", f"time_scale={TIME_SCALE}", *host, *disk


def _lora_args(topology: Topology, model: str) -> tuple[str, ...]:
    """Each worker has room for all adapters, but one step does not serve all of them."""
    if not topology.has_adapters or model != MODEL:
        return ()
    modules = ",".join(f"{name}={adapter_path(name)}" for name in ADAPTERS)
    return "enable_lora=true", "max_loras=2", f"max_cpu_loras={len(ADAPTERS)}", f"lora_modules={modules}"


def _up_settings(topology: Topology) -> UpSettings:
    counts = {phase: topology.phases.count(phase) for phase in ("any", "prefill", "decode")}
    models = [ModelSpec(MODEL, MODEL_PATH, counts["any"], PhaseCounts(counts["prefill"], counts["decode"]))]
    if topology.large:
        models.append(ModelSpec(LARGE, MODEL_PATH, topology.large))
    mesh = LocalMesh(
        tuple(models),
        "simulated",
        (*_engine_args(topology), f"instance.max_model_len_tokens={MODEL_TOKENS}"),
        store_url="",
        http_host="",
        http_port=HTTP_PORT,
        drain_s=DRAIN_S,
        frontends=topology.frontends,
        schedulers=topology.schedulers,
        monitors=topology.monitors,
    )
    return UpSettings(
        mesh,
        topology.policy,
        topology.rescheduler,
        arguments={"frontend": ("--instance-wait-s", f"{topology.instance_wait_s:g}")},
        model_options=MODEL_OPTIONS,
    )


def run_seeds(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """The outcomes as they come, in any order; each in one of `jobs` processes, which are replaced now and then."""
    waiting = iter(seeds)
    context = multiprocessing.get_context("spawn")
    start = partial(_start_process, os.getpid())
    with ProcessPoolExecutor(jobs, context, start, max_tasks_per_child=SEEDS_PER_PROCESS) as pool:
        running: set[Future[Outcome]] = set()
        try:
            while True:
                while len(running) < 2 * jobs and (seed := next(waiting, None)) is not None:
                    running.add(pool.submit(_run_far, seed))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(cancel_futures=True)


def _start_process(parent_pid: int) -> None:
    """Ctrl-C reaches all processes of a terminal. Those that simulate finish what they are at, but do not outlive a
    parent that was killed."""
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_far(seed: int) -> Outcome:
    """Without what cannot travel between processes."""
    outcome = run_seed(seed)
    return Outcome(outcome.seed, outcome.violations, outcome.digest, outcome.virtual_s, outcome.cpu_s)


async def _live(mesh: SimulatedMesh, timeline: Timeline, watch: Watch, workload: Workload) -> None:
    breaker, loop = Breaker(mesh, timeline), mesh.loop
    for name in (STORE,) if timeline.topology.supervised else (STORE, *timeline.topology.member_ids):
        mesh.start(name)
    sampling = asyncio.create_task(_sample(watch), name="sample")
    breaker.begin()
    workload.begin()
    if timeline.topology.routers and timeline.topology.large:
        async with asyncio.timeout(FIRST_REQUEST_S - 1.0):
            await _set_up_cascade(mesh)
    usual = set[str]()
    for before_s in USUAL_BEFORE_S:
        await asyncio.sleep(FIRST_REQUEST_S - before_s - loop.now_s)
        usual |= task_names(mesh)
    await asyncio.sleep(PROBED_S - loop.now_s)
    while loop.now_s < ENDED_S and not all(asked.is_over for asked in workload.asked):  # noqa: ASYNC110  rarely at all
        await asyncio.sleep(QUIET_EVERY_S)
    for asked in workload.asked:
        if not asked.is_over:
            watch.violated("endless request", asked.name, f"sent at {asked.request.at_s:.3f} s and still not answered")
    frontends, models = timeline.topology.frontend_ids, list(timeline.topology.models)
    if timeline.topology.routers and timeline.topology.large and not loses_settings(timeline):
        models.append(CASCADE)
    wanted = list(enumerate(itertools.product(frontends, models), len(timeline.requests)))
    probes = [(workload.send_now(probe(number, model), name), name) for number, (name, model) in wanted]
    await asyncio.sleep(PROBE_S)
    for asked, name in probes:
        answer = asked.attempts[-1].answer
        if not asked.is_over:
            watch.violated("new request not served", name, f"not answered within {PROBE_S:g} s")
        elif answer.error:
            watch.violated("failed request", name, answer.error)
    workload.end()
    await asyncio.sleep(JUDGED_S - loop.now_s)
    for _ in range(int(QUIET_S / QUIET_EVERY_S)):
        if not any(leftovers(mesh, timeline, usual)):
            break
        await asyncio.sleep(QUIET_EVERY_S)
    for kind, who, what in leftovers(mesh, timeline, usual):
        watch.violated(kind, who, what)
    sampling.cancel()
    breaker.end()


async def _set_up_cascade(mesh: SimulatedMesh) -> None:
    """As soon as there is somebody to ask."""
    while not (await mesh.operator.perform(SetCascade(CASCADE, (MODEL, LARGE), (FIRST_THRESHOLD,)))).done:  # noqa: ASYNC110
        await asyncio.sleep(QUIET_EVERY_S)


async def _sample(watch: Watch) -> None:
    while True:
        watch.sample()
        await asyncio.sleep(SAMPLED_EVERY_S)


def _digest(mesh: SimulatedMesh, asked: Iterable[Asked]) -> str:
    digest = hashlib.sha256(mesh.network.digest.encode())
    for one in asked:
        for attempt in one.attempts:
            answer = attempt.answer
            choices = sorted((index, choice.text, choice.finish) for index, choice in answer.choices.items())
            digest.update(repr((one.request.number, attempt.frontend, attempt.ended_s, answer.status)).encode())
            digest.update(repr((choices, answer.error)).encode())
    return digest.hexdigest()[:16]
