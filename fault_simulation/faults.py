"""Breaks a mesh as its timeline says, has operators at work in it, and does what supervisors do: whatever has ended is
started again, where `penstock up` does not do it."""

import asyncio
import random
from contextlib import suppress
from functools import partial
from typing import Any, Final

from engine_worker.role import WorkerRole
from fault_simulation.actions import ApplyPlan, Drain, OperatorAction
from fault_simulation.machines import Life
from fault_simulation.node import NodeTask
from fault_simulation.nodes import STORE, SimulatedMesh
from fault_simulation.timeline import (
    HEALED_S,
    BreakEngine,
    ChangeBlocks,
    Compact,
    Cut,
    DeleteKeys,
    Fault,
    FullDisk,
    FullHostDisk,
    Kill,
    KillInWrite,
    LosePower,
    Pause,
    Slow,
    StepClock,
    Terminate,
    Timeline,
    Wipe,
)
from mesh.errors import StoreError
from mesh.exit_status import ExitStatus

SUPERVISED_EVERY_S: Final = 0.25


class Breaker:
    """Carries out the faults. What cannot be done, as its victim is away already, is left out."""

    def __init__(self, mesh: SimulatedMesh, timeline: Timeline) -> None:
        self._mesh = mesh
        self._timeline = timeline
        self._down_until_s: dict[str, float] = {}
        self._paused: dict[Life, float] = {}
        self._is_planned = any(isinstance(each.action, ApplyPlan) for each in timeline.operations)
        """Whether plans say how many workers there are."""
        self._operations: list[tuple[OperatorAction, NodeTask]] = []
        self._left_drained: set[str] = set()
        """Whose operators were interrupted before they could bring them back."""
        self._supervising: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Plan everything."""
        loop = self._mesh.loop
        for fault in self._timeline.faults:
            loop.call_in_at(loop.world, fault.at_s, self._break, fault)
        for operation in self._timeline.operations:
            loop.call_in_at(loop.world, operation.at_s, self._operate, operation.action)
        loop.call_in_at(loop.world, HEALED_S, self._heal)
        self._supervising = asyncio.create_task(self._supervise(), name="supervise")

    def end(self) -> None:
        """Start nothing any more."""
        if self._supervising is not None:
            self._supervising.cancel()

    def _break(self, fault: Fault) -> None:
        mesh, loop = self._mesh, self._mesh.loop
        match fault:
            case Kill(names=names, for_s=for_s):
                for name in names:
                    self._kill(name, for_s)
            case Terminate(names=names, apart_s=apart_s):
                for index, name in enumerate(names):
                    loop.call_in(loop.world, index * apart_s, self._terminate, name)
            case Pause(name=name, for_s=for_s):
                self._pause(name, for_s)
            case Cut(senders=senders, receivers=receivers, for_s=for_s, both_ways=both_ways):
                ways = [(sender, receiver) for sender in senders for receiver in receivers]
                ways += [(receiver, sender) for sender, receiver in ways] if both_ways else []
                for way in ways:
                    mesh.network.cut(*way)
                    loop.call_in(loop.world, for_s, mesh.network.heal, *way)
            case Slow(first=first, second=second, latency_s=latency_s, for_s=for_s):
                for way in ((first, second), (second, first)):
                    mesh.network.slow(*way, latency_s)
                    loop.call_in(loop.world, for_s, mesh.network.slow, *way, 0.0)
            case Wipe(for_s=for_s):
                self._kill(STORE, for_s)
                mesh.machines[STORE].disk.wipe()
            case FullDisk(for_s=for_s):
                mesh.machines[STORE].disk.is_full = True
                loop.call_in(loop.world, for_s, self._empty_disk)
            case ChangeBlocks(share=share, seed=seed):
                for memory in (*mesh.host_memories.values(), *mesh.host_disks.values()):
                    memory.change_blocks(share, random.Random(seed))
            case FullHostDisk(for_s=for_s):
                self._fill_host_disks(is_full=True)
                loop.call_in(loop.world, for_s, self._fill_host_disks)
            case KillInWrite(for_s=for_s):
                for disk in mesh.host_disks.values():
                    disk.on_write = partial(self._kill_writer, for_s)
            case LosePower(for_s=for_s):
                # The host of all workers: those of plans and scales too.
                drawn = self._timeline.topology.worker_ids
                for name in list(mesh.machines):
                    if name in drawn or isinstance(mesh.role(name), WorkerRole):
                        self._kill(name, for_s)
                mesh.host_memories.clear()
                for disk in mesh.host_disks.values():
                    disk.lose_power()
            case BreakEngine(name=name, for_s=for_s):
                mesh.machines[name].is_engine_broken = True
                loop.call_in(loop.world, for_s, self._mend_engine, name)
            case StepClock(name=name, by_s=by_s):
                mesh.machines[name].wall.step_s += by_s
            case Compact() | DeleteKeys():
                life = mesh.machines[STORE].life
                if life is not None:
                    loop.call_in(life.node, 0.0, _spoil, life, fault)

    def _kill(self, name: str, for_s: float) -> None:
        self._mesh.kill(name)
        self._down_until_s[name] = max(self._down_until_s.get(name, 0.0), self._mesh.loop.now_s + for_s)

    def _terminate(self, name: str) -> None:
        if self._mesh.loop.now_s < HEALED_S and self._mesh.machines[name].is_up:
            self._mesh.terminate(name)

    def _pause(self, name: str, for_s: float) -> None:
        life, until_s = self._mesh.machines[name].life, self._mesh.loop.now_s + for_s
        if life is not None:
            self._paused[life] = max(self._paused.get(life, 0.0), until_s)
            self._mesh.loop.pause(life.node)
            self._mesh.loop.call_in(self._mesh.loop.world, for_s, self._resume, life)

    def _resume(self, life: Life) -> None:
        if self._mesh.loop.now_s >= self._paused.get(life, 0.0) - 1e-6:
            self._mesh.loop.resume(life.node)

    def _mend_engine(self, name: str) -> None:
        self._mesh.machines[name].is_engine_broken = False

    def _empty_disk(self) -> None:
        self._mesh.machines[STORE].disk.is_full = False

    def _fill_host_disks(self, *, is_full: bool = False) -> None:
        for disk in self._mesh.host_disks.values():
            disk.is_full = is_full

    def _kill_writer(self, for_s: float, name: str) -> None:
        """Called in the process that is to die, of which nothing runs afterwards."""
        self._mesh.loop.world.context.copy().run(self._kill, name, for_s)

    def _operate(self, action: OperatorAction) -> None:
        operation = self._mesh.operator.begin(action)
        self._operations.append((action, operation))
        operation.add_done_callback(self._operated)

    def _operated(self, operation: "asyncio.Future[Any]") -> None:
        """What a command raises besides the errors that it shows its user is a bug."""
        if not operation.cancelled() and (error := operation.exception()) is not None:
            self._mesh.loop.report("a command failed", repr(error), self._mesh.operator.node)

    def _heal(self) -> None:
        for action, operation in self._operations:
            if operation.cancel() and isinstance(action, Drain):  # Ctrl-C
                self._left_drained.add(action.worker)
        self._down_until_s.clear()
        self._mesh.network.heal_all()
        self._empty_disk()
        self._fill_host_disks()
        for disk in self._mesh.host_disks.values():
            disk.on_write = None
        for name in self._mesh.machines:
            self._mend_engine(name)
        for life in self._paused:
            self._mesh.loop.resume(life.node)

    async def _supervise(self) -> None:
        while True:
            await asyncio.sleep(SUPERVISED_EVERY_S)
            now_s = self._mesh.loop.now_s
            for name, machine in list(self._mesh.machines.items()):
                if machine.is_up or now_s < self._down_until_s.get(name, 0.0):
                    continue
                is_drained = machine.life is not None and machine.life.status is ExitStatus.DRAINED
                if is_drained and now_s < HEALED_S:  # whoever drained it brings it back
                    continue
                if not machine.is_supervised:
                    self._mesh.start(name)
                elif is_drained and (not self._is_planned or name in self._left_drained):
                    self._left_drained.discard(name)
                    await self._mesh.bring_back(name)


def _spoil(life: Life, fault: Compact | DeleteKeys) -> None:
    """In the store's own process."""
    store = life.store
    if store is None or store.closed:
        return
    with suppress(StoreError):  # on a full disk nothing can be deleted
        if isinstance(fault, Compact):
            store.compact(store.revision)
        else:
            rng = random.Random(fault.draw)
            for entry in store.range("").entries:
                if rng.random() < fault.share:
                    store.delete(entry.key)
