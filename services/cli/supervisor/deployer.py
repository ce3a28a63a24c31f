"""Carries out what the `DeploymentManager` says: has an actuator start and drain instances, publishes how far it is."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from controlplane.deployment.actuator import Actuator
from controlplane.deployment.deployment_status import DeploymentStatus
from controlplane.deployment.manager import (
    DeploymentEvent,
    DeploymentManager,
    Ended,
    EndInstance,
    Publish,
    RecordsChanged,
    Say,
    Started,
    StartFailed,
    StartInstance,
    StepsTaken,
)
from controlplane.deployment.replicas import Shape
from controlplane.model.autoscale_record import SCALES_PREFIX, ScaleRecord
from controlplane.model.cascade_goal import PLANS_PREFIX
from controlplane.model.cascade_record import CASCADES_PREFIX, CascadeRecord
from controlplane.model.duties import AUTOSCALE, CASCADES
from controlplane.planning.cascade.plan import CascadePlan
from mesh.errors import ConfigurationError, PlanInfeasible, StaleLeader
from mesh.leadership_state import Fence
from mesh.store.interface import StateStore
from mesh.store.stored_folder import StoredFolder
from mesh.tasks import TaskSet
from services.cli.supervisor.deployment_notice import DeploymentNotice

LOOK_S = 0.5
"""Between two looks at the processes, while there is a plan."""
IDLE_LOOK_S = 5.0
"""The same while there is none: instances may wait for a place."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an instance may take."""

    ready_s: float
    """To join the mesh."""
    drain_s: float
    """To finish or move what runs on it: what the process itself was told."""


class Deployer:
    """Follows the plans and scales in the state store for as long as `follow` runs."""

    def __init__(
        self,
        manager: DeploymentManager,
        store: StateStore,
        actuator: Actuator,
        drain_s: float,
        clock: Callable[[], float],
        on_event: Callable[[str], None],
    ) -> None:
        """`on_event` hears, in words, what is done and what is missing; `clock` gives monotonic seconds."""
        self.manager = manager
        self._actuator = actuator
        self._drain_s = drain_s
        self._clock = clock
        self._on_event = on_event
        self._news = asyncio.Event()
        self._tasks = TaskSet("deployer")
        self._fence = Fence()
        self._shapes: Mapping[str, Shape] | None = None
        self._asked: Mapping[str, ScaleRecord] = {}
        self._notice = DeploymentNotice(store)
        self._plans = StoredFolder(store, PLANS_PREFIX, CascadePlan, self._check, self._on_change)
        self._cascades = StoredFolder(store, CASCADES_PREFIX, CascadeRecord, CascadeRecord.checked, self._on_change)
        self._scales = StoredFolder(store, SCALES_PREFIX, ScaleRecord, self._check_scale, self._on_change)

    def wake(self) -> None:
        """Look at the processes soon: something may have to be done."""
        self._news.set()

    def serve(self, shapes: Mapping[str, Shape], asked: Mapping[str, ScaleRecord]) -> None:
        """From now on these models can be scaled here, in these shapes; where the state store has no scale of a model,
        the one in `asked` holds."""
        if (self._shapes, self._asked) != (shapes, asked):
            self._shapes, self._asked = dict(shapes), dict(asked)
            self._take_in()

    async def follow(self) -> None:
        """Start and end instances as the plans in force say, until cancelled."""
        unsubscribe = self._actuator.subscribe(self.wake)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._plans.follow())
                group.create_task(self._cascades.follow())
                group.create_task(self._scales.follow())
                group.create_task(self._notice.keep())
                group.create_task(self._work())
        finally:
            unsubscribe()
            await self._tasks.cancel()

    async def turn(self) -> DeploymentStatus:
        """Look, do what can be begun now, and return how far it is."""
        await self.handle(self._actuator.observe())
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
                    self._tasks.spawn(self._end(name, drains), name=name)
                case Say(line):
                    self._on_event(line)
                case Publish(status):
                    self._notice.say(status)

    async def _start(self, instance: StartInstance) -> None:
        try:
            await self._actuator.start(instance)
        except ConfigurationError as error:
            await self.handle(StartFailed(instance.name, str(error)))
        else:
            await self.handle(Started(instance.name))

    async def _end(self, name: str, drains: bool) -> None:
        await (self._actuator.drain(name, self._drain_s) if drains else self._actuator.stop(name))
        await self.handle(Ended(name))
        self.wake()

    async def _work(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self.manager.follows_plans else IDLE_LOOK_S):
                    await self._news.wait()
            self._news.clear()
            # What is not heard yet could mean more replicas: nothing may be ended for want of it.
            if self._plans.is_heard and self._cascades.is_heard and self._scales.is_heard:
                await self.turn()

    def _on_change(self, _name: str, _record: object) -> None:
        self._take_in()

    def _take_in(self) -> None:
        scales = {**self._asked, **self._scales.records}
        changed = RecordsChanged(dict(self._plans.records), dict(self._cascades.records), scales, self._shapes)
        for instruction in self.manager.handle(changed, self._clock()):
            assert isinstance(instruction, Say), "records alone start and end nothing"
            self._on_event(instruction.line)
        self.wake()

    def _check_scale(self, scale: ScaleRecord) -> None:
        """Raises `ConfigurationError` as `_check` does."""
        scale.checked()
        try:
            if scale.epoch:
                self._fence.check(f"{AUTOSCALE} of {scale.model}", scale.epoch, scale.leader)
        except StaleLeader as error:
            raise ConfigurationError(str(error)) from error

    def _check(self, plan: CascadePlan) -> None:
        """Raises `ConfigurationError` for a plan that contradicts itself, or of a planner that leads no more: it never
        takes the place of a good one."""
        try:
            plan.checked()
            if plan.epoch:
                self._fence.check(f"{CASCADES} of {plan.name}", plan.epoch, plan.leader)
        except (PlanInfeasible, StaleLeader) as error:
            raise ConfigurationError(str(error)) from error
