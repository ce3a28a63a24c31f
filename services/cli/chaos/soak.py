"""A soak: one random fault after another under streams and new requests, while the memory of every role is watched."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from mesh.errors import PenstockError
from mesh.run_file import RunFile
from mesh.tasks import TaskSet
from services.cli.chaos.experiment import Prepared, TrafficPlan, prepared
from services.cli.chaos.faults import broken, healed
from services.cli.chaos.memory import MemoryOfRole, MemorySamples, grown
from services.cli.chaos.processes import resident_bytes
from services.cli.chaos.schedule import ScheduledFault, scheduled_faults, survivable_faults
from services.cli.chaos.traffic import Traffic
from services.cli.chaos.verdict import Fault, failures_in
from services.cli.restarting import ROLLING_ORDER

SAMPLE_EVERY_S = 2.0
BUG_SIGNS = ("Task was destroyed", "already running", "was never awaited", "was never retrieved", "task died")
"""In a log, these tell of a bug even where no request noticed."""
MAX_LOG_LINES = 20


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """How long faults are injected, and the traffic under them."""

    duration_s: float
    traffic: TrafficPlan
    heal_s: float
    """What the mesh is given to be whole again after each fault."""


class SoakReport(msgspec.Struct, frozen=True):
    """What `penstock chaos --soak` prints. Counts of requests are as in `ChaosReport`."""

    duration_s: float
    streams: int
    new_requests: int
    failed: int
    lost: int
    duplicated: int
    wrong: int
    unfit: int
    faults: dict[Fault, int]
    """How often each was injected."""
    unhealed: tuple[str, ...]
    """What was missing for more than a minute after a fault, and faults that could not be brought to their end."""
    log_bugs: tuple[str, ...]
    """Lines of the processes' logs that tell of a bug."""
    resumed: int
    gap_ms_max: float
    wait_ms_max: float
    memory_growth: dict[str, float]
    """By role, first third against last third; the supervisor of `penstock up` with its store is `up`."""
    memory: dict[str, MemoryOfRole]
    engine: str
    seed: int

    @property
    def passed(self) -> bool:
        """Nothing failed, nothing came out wrong, nothing stayed broken, nothing grew."""
        wrong = self.failed or self.lost or self.duplicated or self.wrong or self.unfit
        return not (wrong or self.unhealed or self.log_bugs or grown(self.memory))


@dataclass
class _Progress:
    faults: Counter[Fault] = field(default_factory=Counter)
    unhealed: list[str] = field(default_factory=list)
    memory: MemorySamples = field(default_factory=MemorySamples)


async def run_soak(
    plan: SoakPlan, url: str, store: str | None, mesh: str, running: RunFile | None, say: Callable[[str], None]
) -> tuple[SoakReport, list[str]]:
    """The report, and a line for whatever went wrong; `running` is the mesh that runs on this machine. Raises
    PenstockError if the mesh cannot be used."""
    clock = asyncio.get_running_loop().time
    async with prepared(plan.traffic, url, store, mesh, say) as ready:
        engine = ready.target.workers[0].attributes.get("engine", "")
        traffic, progress, tasks = Traffic(ready.client, ready.load), _Progress(), TaskSet("soak")
        began_s = clock()
        try:
            tasks.spawn(_watch_memory(ready, running, progress.memory), name="memory")
            traffic.start_streams()
            traffic.start_new()
            await _inject_until(began_s + plan.duration_s, plan, ready, traffic, progress)
            ended_s = clock()
            await traffic.end_streams()
            await traffic.end_new()
        finally:
            await tasks.cancel()
            await traffic.cancel()
        memory = progress.memory.by_role(began_s, ended_s)
        log_bugs = log_bugs_in(Path(running.log_dir)) if running else ()
        outcomes = traffic.streams.outcomes + traffic.new.outcomes
        report = SoakReport(
            duration_s=round(ended_s - began_s, 1),
            streams=traffic.streams.requests,
            new_requests=traffic.new.requests,
            failed=traffic.streams.failed + traffic.new.failed,
            lost=outcomes["lost"],
            duplicated=outcomes["duplicated"],
            wrong=outcomes["wrong"],
            unfit=traffic.streams.unfit + traffic.new.unfit,
            faults=dict(progress.faults),
            unhealed=tuple(progress.unhealed),
            log_bugs=log_bugs,
            resumed=traffic.streams.resumptions + traffic.new.resumptions,
            gap_ms_max=round(max(traffic.streams.gaps_ms, default=0.0), 1),
            wait_ms_max=round(max(traffic.new.waits_ms, default=0.0), 1),
            memory_growth={role: each.growth for role, each in memory.items()},
            memory=memory,
            engine=engine,
            seed=plan.traffic.seed,
        )
        return report, [*failures_in((traffic.streams, traffic.new)), *progress.unhealed, *log_bugs, *grown(memory)]


async def _inject_until(end_s: float, plan: SoakPlan, ready: Prepared, traffic: Traffic, progress: _Progress) -> None:
    clock, target = asyncio.get_running_loop().time, ready.target
    members = {role: len(target.directory.members(role)) for role in ROLLING_ORDER}
    for number, scheduled in enumerate(scheduled_faults(plan.traffic.seed, survivable_faults(members)), 1):
        await asyncio.sleep(min(scheduled.pause_s, end_s - clock()))
        if clock() >= end_s:
            return
        target.say(f"fault {number}: {scheduled.fault}")
        await _inject(scheduled, ready, progress, plan.heal_s)
        failed = traffic.streams.failed + traffic.new.failed
        target.say(f"{traffic.streams.requests} streams and {traffic.new.requests} new requests, {failed} failed")


async def _inject(scheduled: ScheduledFault, ready: Prepared, progress: _Progress, heal_s: float) -> None:
    """Inject one fault and wait until the mesh is whole again. A fault without a target is passed over."""
    progress.faults[scheduled.fault] += 1
    try:
        async with broken(scheduled.fault, 1, ready.target):
            if scheduled.fault == "hang":
                await asyncio.sleep(scheduled.hold_s)
    except PenstockError as error:
        progress.unhealed.append(f"{scheduled.fault}: {error}")
    lacking = await healed(ready.target.directory, frozenset(), heal_s)
    progress.unhealed += [f"after {scheduled.fault}: {sentence}" for sentence in lacking]


async def _watch_memory(ready: Prepared, running: RunFile | None, samples: MemorySamples) -> None:
    clock = asyncio.get_running_loop().time
    while True:
        for role in ROLLING_ORDER:
            for member in ready.target.directory.members(role):
                with suppress(KeyError, ValueError):  # it announces no process
                    pid = int(member.attributes["pid"])
                    if resident := resident_bytes(pid):
                        samples.add(clock(), role, member.incarnation_id, resident)
        if running is not None and (resident := resident_bytes(running.pid, descendants=False)):
            samples.add(clock(), "up", str(running.pid), resident)
        await asyncio.sleep(SAMPLE_EVERY_S)


def log_bugs_in(log_dir: Path) -> tuple[str, ...]:
    """Lines of the logs there that tell of a bug, the first few."""
    found: list[str] = []
    for path in sorted(log_dir.glob("*.log")):
        with path.open(errors="replace") as lines:
            found += [f"{path.name}: {line.strip()[:300]}" for line in lines if any(each in line for each in BUG_SIGNS)]
    return tuple(found[:MAX_LOG_LINES])
