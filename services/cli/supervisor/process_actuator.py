"""Instances as processes of this machine, under the supervisor of `penstock up`."""

from collections.abc import Callable

from controlplane.deployment.manager import Looked, StartInstance
from mesh.errors import ConfigurationError
from mesh.membership import Directory
from services.cli.supervisor.launcher import ProcessSpec
from services.cli.supervisor.supervisor import KILL_AFTER_S, Supervisor

MakeSpec = Callable[[StartInstance], ProcessSpec]
"""The process of an instance. Raises `ConfigurationError` where it cannot be run here."""


class ProcessActuator:
    """Implements `controlplane.deployment.actuator.Actuator`."""

    def __init__(self, supervisor: Supervisor, directory: Directory, make_spec: MakeSpec) -> None:
        self._supervisor = supervisor
        self._directory = directory
        self._make_spec = make_spec

    async def start(self, instance: StartInstance) -> None:
        try:
            await self._supervisor.add(self._make_spec(instance))
        except OSError as error:
            raise ConfigurationError(f"its process cannot be started: {error}") from error

    async def drain(self, name: str, drain_s: float) -> None:
        """See `Actuator`: a worker that is told to end moves what it can to others first."""
        if name in self._supervisor.names():
            await self._supervisor.remove(name, KILL_AFTER_S + drain_s)

    async def stop(self, name: str) -> None:
        await self.drain(name, 0.0)

    def observe(self) -> Looked:
        joined = {member.member_id: member.incarnation_id for member in self._directory.members("worker")}
        return Looked(self._supervisor.names(), dict(self._supervisor.given_up()), joined, self._supervisor.waiting())

    def subscribe(self, heard: Callable[[], None]) -> Callable[[], None]:
        """See `Actuator`: workers that come and go."""
        return self._directory.subscribe(lambda _: heard())
