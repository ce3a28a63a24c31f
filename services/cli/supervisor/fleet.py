"""The instances that a supervisor has started: how far each has come, and how they are started and ended."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mesh.errors import ConfigurationError
from mesh.membership import Directory
from mesh.tasks import TaskSet
from services.cli.supervisor.gpus import GpuPool
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.replicas import Replica, Shape, Standing, new_name
from services.cli.supervisor.steps import TierShape
from services.cli.supervisor.supervisor import KILL_AFTER_S, Supervisor

log = logging.getLogger(__name__)

MakeSpec = Callable[[str, str, Shape], ProcessSpec]
"""The process of (model, name, shape), its GPUs taken. Raises `ConfigurationError` where it cannot be run here."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an instance may take."""

    ready_s: float
    """To join the mesh."""
    drain_s: float
    """To finish or move what runs on it: what the process itself was told."""


@dataclass(slots=True)
class _Instance:
    model: str
    shape: Shape
    formerly: str = ""
    """Incarnation that had the name when this one was started; it may be listed until its lease has run out."""
    standing: Standing = Standing.STARTING
    unjoined_since_s: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Sight:
    """What became of instances since the last look."""

    failed: tuple[tuple[TierShape, str], ...] = ()
    """Each once, with the reason."""
    drained: tuple[TierShape, ...] = ()
    """By an operator: they are not to come back by themselves."""


@dataclass
class Fleet:
    """Instances of all models, whether or not they are planned."""

    supervisor: Supervisor
    directory: Directory
    gpus: GpuPool
    make_spec: MakeSpec
    patience: Patience
    clock: Callable[[], float]
    """Monotonic seconds."""
    on_change: Callable[[], None] = lambda: None
    """Told when an instance has ended."""
    _instances: dict[str, _Instance] = field(default_factory=dict)
    _tasks: TaskSet = field(default_factory=lambda: TaskSet("fleet"))

    def adopt(self, running: Mapping[str, Mapping[str, Shape]]) -> None:
        """Take over what was started before, by model and name."""
        for model, shapes in running.items():
            for name, shape in shapes.items():
                self._instances[name] = _Instance(model, shape)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """As of the last look, in the order in which they were started."""
        return tuple(Replica(name, it.model, it.shape, it.standing) for name, it in self._instances.items())

    def look(self) -> Sight:
        """See who has joined, failed or gone."""
        alive, given_up = self.supervisor.names(), self.supervisor.given_up()
        joined = {member.member_id: member.incarnation_id for member in self.directory.members("worker")}
        failed: list[tuple[TierShape, str]] = []
        drained: list[TierShape] = []
        for name, instance in list(self._instances.items()):
            if instance.standing is Standing.ENDING:
                continue
            if name not in alive:
                self._forget(name)
                drained.append((instance.model, instance.shape))
                continue
            has_joined = joined.get(name, instance.formerly) != instance.formerly
            why = self._failure(name, instance, has_joined, given_up)
            if why and not instance.failure:
                failed.append(((instance.model, instance.shape), why))
            instance.failure = why
            if why:
                instance.standing = Standing.FAILED
            else:
                instance.standing = Standing.SERVING if has_joined else Standing.STARTING
        return Sight(tuple(failed), tuple(drained))

    async def start(self, model: str, shape: Shape) -> str:
        """Start another instance and return its name. Raises `ConfigurationError` where it cannot be run here."""
        name = new_name(model, self.supervisor.names() | self._instances.keys())
        formerly = [each.incarnation_id for each in self.directory.members("worker") if each.member_id == name]
        try:
            await self.supervisor.add(self.make_spec(model, name, shape))
        except OSError as error:
            self.gpus.give_back(name)
            raise ConfigurationError(f"its process cannot be started: {error}") from error
        self._instances[name] = _Instance(model, shape, "".join(formerly), unjoined_since_s=self.clock())
        return name

    def end(self, name: str) -> None:
        """Drain an instance in the background; one that has failed is not waited for."""
        instance = self._instances[name]
        failed = instance.standing is Standing.FAILED
        instance.standing = Standing.ENDING
        self._tasks.spawn(self._remove(name, KILL_AFTER_S + (0 if failed else self.patience.drain_s)), name=name)

    async def stop(self) -> None:
        """Wait for nobody any more."""
        await self._tasks.cancel()

    def _failure(self, name: str, instance: _Instance, has_joined: bool, given_up: Mapping[str, str]) -> str:
        """Why the instance is of no use; "" while it is, or may yet be."""
        if name in given_up:
            return f"{name} was given up: {given_up[name]}"
        if has_joined:
            instance.unjoined_since_s = None
            return ""
        if instance.unjoined_since_s is None:
            instance.unjoined_since_s = self.clock()
        if self.clock() - instance.unjoined_since_s >= self.patience.ready_s:
            return f"{name} was not in the mesh for {self.patience.ready_s:g} s; see its log"
        return ""

    async def _remove(self, name: str, kill_after_s: float) -> None:
        if name in self.supervisor.names():
            await self.supervisor.remove(name, kill_after_s)
        self._forget(name)
        self.on_change()

    def _forget(self, name: str) -> None:
        del self._instances[name]
        self.gpus.give_back(name)
