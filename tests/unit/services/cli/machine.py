"""A machine without processes: a supervisor and a directory that do what a test says, on so many GPUs."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

from controlplane.deployment.deployment_status import DeploymentStatus
from controlplane.deployment.gpus import GpuPool
from controlplane.deployment.manager import DeploymentManager, RecordsChanged, Say, StartInstance
from controlplane.deployment.replicas import Shape, gpus_of
from controlplane.model.autoscale_record import ScaleRecord
from controlplane.model.cascade_record import CascadeRecord
from controlplane.planning.cascade.plan import CascadePlan, PlannedReplicas, PlannedTier
from mesh.errors import ConfigurationError
from mesh.membership import Directory, Member
from mesh.store.interface import StateStore
from services.cli.supervisor.deployer import Deployer
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.process_actuator import ProcessActuator
from services.cli.supervisor.supervisor import Supervisor

READY_S, DRAIN_S = 300.0, 600.0
ONE, TWO = (1, 1), (2, 1)


def planned(cascade: str, **tiers: dict[Shape, int]) -> CascadePlan:
    """So many instances of each model and shape."""
    return CascadePlan(
        cascade,
        tuple(
            PlannedTier(model, 99, tuple(PlannedReplicas(count, *shape) for shape, count in shapes.items()), 0.0, 1.0)
            for model, shapes in tiers.items()
        ),
        (50.0,) * (len(tiers) - 1),
        1.0,
        1.0,
        1.0,
        99 * len(tiers),
    )


class Machine:
    """Both the supervisor and the directory of a `Deployer`."""

    def __init__(self, gpus: int, store: StateStore, gpu_kind: str = "", **running: list[Shape]) -> None:
        self.now_s = 1000.0
        self.events: list[str] = []
        self.processes: dict[str, ProcessSpec] = {}
        self.joined: dict[str, str] = {}
        """Incarnations, by name."""
        self.kill_after_s: dict[str, float] = {}
        """Of those that are draining."""
        self.broken: set[str] = set()
        """Models that this machine cannot run."""
        self._gave_up: dict[str, str] = {}
        self._ended: dict[str, asyncio.Event] = {}
        self._incarnations = 0
        self.gpus = GpuPool(gpus)
        self._revision = 0
        shapes_of = {
            model: {f"{model}-{number}": shape for number, shape in enumerate(shapes)}
            for model, shapes in running.items()
        }
        for model, shapes in shapes_of.items():
            for name, shape in shapes.items():
                environment = self.gpus.take(name, gpus_of(shape))
                self.processes[name] = self._spec(StartInstance(name, model, shape, environment))
                self.joins(name)
        self.manager = DeploymentManager(
            "here",
            self.gpus,
            READY_S,
            shapes_of,
            {model: shapes[0] for model, shapes in running.items() if shapes},
            gpu_kind,
        )
        self.deployer = Deployer(
            self.manager,
            store,
            ProcessActuator(cast(Supervisor, self), cast(Directory, self), self._spec),
            DRAIN_S,
            lambda: self.now_s,
            self.events.append,
        )

    # What a deployer asks of a supervisor and of a directory.

    async def add(self, spec: ProcessSpec) -> None:
        assert spec.name not in self.processes
        self.processes[spec.name] = spec

    async def remove(self, name: str, kill_after_s: float) -> None:
        self.joined.pop(name, None)
        self.kill_after_s[name] = kill_after_s
        if name not in self._gave_up:
            self._ended[name] = asyncio.Event()
            await self._ended[name].wait()
        self._gave_up.pop(name, None)
        del self.kill_after_s[name], self.processes[name]

    def names(self) -> frozenset[str]:
        return frozenset(self.processes)

    def waiting(self) -> dict[str, str]:
        return {}

    def given_up(self) -> dict[str, str]:
        return self._gave_up

    def members(self, role: str) -> tuple[Member, ...]:
        return tuple(Member(role, name, incarnation, "", "") for name, incarnation in self.joined.items())

    def subscribe(self, _heard: Callable[[Any], None]) -> Callable[[], None]:
        return lambda: None

    def _spec(self, instance: StartInstance) -> ProcessSpec:
        if instance.model in self.broken:
            raise ConfigurationError(f"no model {instance.model} here")
        return ProcessSpec(instance.name, "worker", (), instance.environment)

    # What a test lets happen.

    def plan(self, *plans: CascadePlan) -> None:
        """These and no others are in force."""
        self._revision += 1
        self.put_in_force({plan.name: (self._revision, plan) for plan in plans})

    def put_in_force(self, plans: Mapping[str, tuple[int, CascadePlan]]) -> None:
        """These, by cascade, with their revisions."""
        cascades = {
            name: CascadeRecord(name, tuple(tier.model for tier in plan.tiers), plan.thresholds, plan_revision=revision)
            for name, (revision, plan) in plans.items()
        }
        changed = RecordsChanged({name: plan for name, (_, plan) in plans.items()}, cascades)
        self.events += [each.line for each in self.manager.handle(changed, self.now_s) if isinstance(each, Say)]

    def scale(self, *records: ScaleRecord) -> None:
        """These hold, and no plan is in force."""
        changed = RecordsChanged({}, {}, {record.model: record for record in records})
        self.events += [each.line for each in self.manager.handle(changed, self.now_s) if isinstance(each, Say)]

    def joins(self, name: str) -> None:
        self._incarnations += 1
        self.joined[name] = f"incarnation {self._incarnations}"

    def drains_by_itself(self, name: str) -> None:
        """As asked for by an operator."""
        del self.processes[name], self.joined[name]

    def keeps_ending(self, name: str) -> None:
        self.joined.pop(name, None)
        self._gave_up[name] = "it kept ending (status 1)"

    async def ends(self, name: str) -> None:
        """What ran on it is done."""
        self._ended[name].set()
        await self._let_tasks_run()

    async def turn(self, after_s: float = 0.0) -> DeploymentStatus:
        self.now_s += after_s
        record = await self.deployer.turn()
        await self._let_tasks_run()
        self.manager.validate()
        return record

    async def settle(self) -> DeploymentStatus:
        """Whatever is started joins, whatever is drained ends."""
        for _ in range(100):
            record = await self.turn(after_s=61.0)
            for name in list(self.kill_after_s):
                await self.ends(name)
            for name in self.processes:
                if name not in self.joined and name not in self.kill_after_s and name not in self._gave_up:
                    self.joins(name)
            if record.is_reached:
                return record
        raise AssertionError(f"it is never reached: {record}")

    @property
    def serving(self) -> Counter[tuple[str, Shape]]:
        """By model and shape."""
        return Counter((each.model, each.shape) for each in self.manager.replicas if each.name in self.joined)

    @property
    def starting(self) -> set[str]:
        return set(self.processes) - set(self.joined) - set(self.kill_after_s)

    @staticmethod
    async def _let_tasks_run() -> None:
        for _ in range(5):
            await asyncio.sleep(0)
