"""What carries instances: processes of this machine, containers, pods. Who decides knows no more of it than this."""

from collections.abc import Callable
from typing import Protocol

from controlplane.deployment.manager import Looked, StartInstance


class Actuator(Protocol):
    """Starts and ends instances by name. Names are free again once `drain` or `stop` has returned."""

    async def start(self, instance: StartInstance) -> None:
        """Have an instance run and start it again when it dies. Raises `ConfigurationError` where none can run."""

    async def drain(self, name: str, drain_s: float) -> None:
        """Let an instance finish or move its requests for so long, then end it; returns when it and all that it had
        started are gone. No effect for one that is gone already."""

    async def stop(self, name: str) -> None:
        """The same for one that serves nobody."""

    def observe(self) -> Looked:
        """What runs, what was given up, and who has joined the mesh."""

    def subscribe(self, heard: Callable[[], None]) -> Callable[[], None]:
        """Have `heard` called when there is something new to observe, until what is returned is called."""
