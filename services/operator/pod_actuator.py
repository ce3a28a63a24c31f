"""Instances as pods of a cluster."""

from collections.abc import Callable
from dataclasses import replace

from controlplane.deployment.manager import Looked, StartInstance
from services.cli.supervisor.process_actuator import ProcessActuator
from services.operator.followed_objects import FollowedObjects
from services.operator.pod import Pod


class PodActuator:
    """Implements `controlplane.deployment.actuator.Actuator`: what a supervisor of pods does, until the API server has
    forgotten a pod, too."""

    def __init__(self, supervised: ProcessActuator, pods: FollowedObjects[Pod]) -> None:
        """`supervised`: the actuator of a supervisor with a `PodLauncher`."""
        self._supervised = supervised
        self._pods = pods

    async def start(self, instance: StartInstance) -> None:
        await self._supervised.start(instance)

    async def drain(self, name: str, drain_s: float) -> None:
        """See `Actuator`: of exactly this pod."""
        await self._supervised.drain(name, drain_s)
        await self._pods.until(lambda: name not in self._instances())

    async def stop(self, name: str) -> None:
        await self.drain(name, 0.0)

    def observe(self) -> Looked:
        """See `Actuator`. A name is taken for as long as there is a pod of it."""
        seen = self._supervised.observe()
        return replace(seen, names=seen.names | self._instances())

    def subscribe(self, heard: Callable[[], None]) -> Callable[[], None]:
        """See `Actuator`: workers and pods that come and go."""
        ends = (self._supervised.subscribe(heard), self._pods.subscribe(heard))

        def unsubscribe() -> None:
            for end in ends:
                end()

        return unsubscribe

    def _instances(self) -> frozenset[str]:
        return frozenset(pod.instance for pod in self._pods.objects.values())
