"""Carries out what the `DeploymentManager` says: starts and drains processes, and publishes how far it is."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from controlplane.deployment.deployment_status import DeploymentStatus
from controlplane.deployment.manager import (
    DeploymentEvent,
    DeploymentManager,
    Ended,
    EndInstance,
    Looked,
    Publish,
    RecordsChanged,
    Say,
    Started,
    StartFailed,
    StartInstance,
    StepsTaken,
)
from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.model.duties import CASCADES
from controlplane.planning.cascade.plan import CascadePlan
from mesh.errors import ConfigurationError, PlanInfeasible, StaleLeader
from mesh.leadership_state import Fence
from mesh.membership import Directory
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet
from services.cli.supervisor.deployment_notice import DeploymentNotice
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.supervisor import KILL_AFTER_S, Supervisor

LOOK_S = 0.5
"""Between two looks at the processes, while there is a plan."""

MakeSpec = Callable[[StartInstance], ProcessSpec]
"""The process of an instance. Raises `ConfigurationError` where it cannot be run here."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an instance may take."""

    ready_s: float
    """To join the mesh."""
    drain_s: float
    """To finish or move what runs on it: what the process itself was told."""


class Deployer:
    """Follows the plans in the state store for as long as `follow` runs."""

    def __init__(
        self,
        manager: DeploymentManager,
        store: StateStore,
        supervisor: Supervisor,
        directory: Directory,
        make_spec: MakeSpec,
        drain_s: float,
        clock: Callable[[], float],
        on_event: Callable[[str], None],
    ) -> None:
        """`on_event` hears, in words, what is done and what is missing; `clock` gives monotonic seconds."""
        self.manager = manager
        self._supervisor = supervisor
        self._directory = directory
        self._make_spec = make_spec
        self._drain_s = drain_s
        self._clock = clock
        self._on_event = on_event
        self._news = asyncio.Event()
        self._tasks = TaskSet("deployer")
        self._fence = Fence()
        self._notice = DeploymentNotice(store)
        self._plans = StoredFolder(store, PLANS_PREFIX, CascadePlan, self._check, self._on_change)
        self._cascades = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked, self._on_change)

    def wake(self) -> None:
        """Look at the processes soon: something may have to be done."""
        self._news.set()

    async def follow(self) -> None:
        """Start and end instances as the plans in force say, until cancelled."""
        unsubscribe = self._directory.subscribe(lambda _: self.wake())
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._plans.follow())
                group.create_task(self._cascades.follow())
                group.create_task(self._notice.keep())
                group.create_task(self._work())
        finally:
            unsubscribe()
            await self._tasks.cancel()

    async def turn(self) -> DeploymentStatus:
        """Look, do what can be begun now, and return how far it is."""
        joined = {member.member_id: member.incarnation_id for member in self._directory.members("worker")}
        await self.handle(Looked(self._supervisor.names(), dict(self._supervisor.given_up()), joined))
        await self.handle(StepsTaken())
        assert self.manager.status is not None, "the first turn publishes it"
        return self.manager.status

    async def handle(self, event: DeploymentEvent) -> None:
        """Tell the manager of an event and carry out what comes back."""
        for instruction in self.manager.handle(event, self._clock()):
            match instruction:
                case StartInstance():
                    await self._start(instruction)
                case EndInstance(name, drains):
                    self._tasks.spawn(self._end(name, KILL_AFTER_S + (self._drain_s if drains else 0)), name=name)
                case Say(line):
                    self._on_event(line)
                case Publish(status):
                    self._notice.say(status)

    async def _start(self, instance: StartInstance) -> None:
        try:
            await self._supervisor.add(self._make_spec(instance))
        except OSError as error:
            await self.handle(StartFailed(instance.name, f"its process cannot be started: {error}"))
        except ConfigurationError as error:
            await self.handle(StartFailed(instance.name, str(error)))
        else:
            await self.handle(Started(instance.name))

    async def _end(self, name: str, kill_after_s: float) -> None:
        if name in self._supervisor.names():
            await self._supervisor.remove(name, kill_after_s)
        await self.handle(Ended(name))
        self.wake()

    async def _work(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self.manager.follows_plans else None):
                    await self._news.wait()
            self._news.clear()
            await self.turn()

    def _on_change(self, _name: str, _record: object) -> None:
        changed = RecordsChanged(dict(self._plans.records), dict(self._cascades.records))
        for instruction in self.manager.handle(changed, self._clock()):
            assert isinstance(instruction, Say), "records alone start and end nothing"
            self._on_event(instruction.line)
        self.wake()

    def _check(self, plan: CascadePlan) -> None:
        """Raises `ConfigurationError` for a plan that contradicts itself, or of a planner that leads no more: it never
        takes the place of a good one."""
        try:
            plan.checked()
            if plan.epoch:
                self._fence.check(f"{CASCADES} of {plan.name}", plan.epoch, plan.leader)
        except (PlanInfeasible, StaleLeader) as error:
            raise ConfigurationError(str(error)) from error
