"""Runs one timeline, or many seeds over several processes."""

import asyncio
import hashlib
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

from controlplane.scheduler.settings import SchedulerSettings
from engine_worker.settings import WorkerSettings
from fault_simulation.aftermath import PROBE_S, PROBED_S, leftovers, probe, task_names
from fault_simulation.faults import Breaker
from fault_simulation.invariants import SAMPLED_EVERY_S, Violation, Watch
from fault_simulation.loop import SimulationStuck
from fault_simulation.nodes import HTTP_PORT, SimulatedMesh
from fault_simulation.timeline import FIRST_REQUEST_S, HEALED_S, JUDGED_S, MODEL, STORE, Timeline, draw
from fault_simulation.workload import MODEL_PATH, MODEL_TOKENS, Asked, Workload
from services.frontend.settings import FrontendSettings

ENDED_S: Final = HEALED_S + 42.0
"""When the last request is to have ended: those that waited for a frontend all this time come at once."""
QUIET_S: Final = 6.0
"""In which what is left of the last requests has to go."""
QUIET_EVERY_S: Final = 0.25
TIME_SCALE: Final = 2.5
"""Of the engines: fewer steps, and requests that live through more."""
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
    watch = Watch(mesh, may_lose_workers=bool(timeline.faults))
    workload = Workload(mesh, timeline, watch.attempt_ended)
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
    for name in topology.monitor_ids:
        mesh.add_monitor(name)
    for name in topology.scheduler_ids:
        mesh.add_scheduler(name, SchedulerSettings(policy=topology.policy, rescheduler=topology.rescheduler))
    for name, phase in zip(topology.worker_ids, topology.phases, strict=True):
        instance = {"kv_blocks": topology.kv_blocks, "max_model_len_tokens": MODEL_TOKENS}
        options = (*(f"instance.{key}={value}" for key, value in instance.items()), f"time_scale={TIME_SCALE}")
        settings = WorkerSettings(
            model=MODEL, model_path=str(MODEL_PATH), engine="simulated", engine_option=options, phase=phase
        )
        mesh.add_worker(name, settings)
    for name in topology.frontend_ids:
        wait_s = topology.instance_wait_s
        mesh.add_frontend(name, FrontendSettings(http_host=name, http_port=HTTP_PORT, instance_wait_s=wait_s))
    return mesh


def run_seeds(seeds: Iterable[int], jobs: int) -> Iterator[Outcome]:
    """The outcomes as they come, in any order; each in one of `jobs` processes, which are replaced now and then."""
    waiting = iter(seeds)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=SEEDS_PER_PROCESS) as pool:
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


def _run_far(seed: int) -> Outcome:
    """Without what cannot travel between processes."""
    outcome = run_seed(seed)
    return Outcome(outcome.seed, outcome.violations, outcome.digest, outcome.virtual_s, outcome.cpu_s)


async def _live(mesh: SimulatedMesh, timeline: Timeline, watch: Watch, workload: Workload) -> None:
    breaker, loop = Breaker(mesh, timeline), mesh.loop
    for name in (STORE, *timeline.topology.member_ids):
        mesh.start(name)
    sampling = asyncio.create_task(_sample(watch), name="sample")
    breaker.begin()
    workload.begin()
    await asyncio.sleep(FIRST_REQUEST_S - 0.01)
    usual = task_names(mesh)
    await asyncio.sleep(PROBED_S - loop.now_s)
    while loop.now_s < ENDED_S and not all(asked.is_over for asked in workload.asked):  # noqa: ASYNC110  rarely at all
        await asyncio.sleep(QUIET_EVERY_S)
    for asked in workload.asked:
        if not asked.is_over:
            watch.violated("endless request", asked.name, f"sent at {asked.request.at_s:.3f} s and still not answered")
    probes = [
        workload.send_now(probe(len(timeline.requests) + index), name)
        for index, name in enumerate(timeline.topology.frontend_ids)
    ]
    await asyncio.sleep(PROBE_S)
    for asked, name in zip(probes, timeline.topology.frontend_ids, strict=True):
        answer = asked.attempts[-1].answer
        if not asked.is_over or answer.error:
            watch.violated("new request not served", name, answer.error or f"not answered within {PROBE_S:g} s")
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
