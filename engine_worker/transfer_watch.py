"""Whether requests can be moved to and from this worker, as its KV transfer agent says."""

import logging
from collections.abc import Callable

from engine_worker.instance import Instance
from engine_worker.kv.service import AgentPort
from engine_worker.kv.transfer import AgentStatus
from mesh.errors import ConfigurationError, KvTransferRefused, PenstockError
from mesh.runtime import Clock

log = logging.getLogger(__name__)

LOOK_S = 1.0


class TransferWatch:
    """Asks the agent, which may live in the engine's process, and tells the instance: its load reports bear the
    obstacle, it neither offers nor takes requests that move while there is one, and a metric shows it."""

    def __init__(self, instance: Instance, agent: Callable[[], AgentPort], clock: Clock) -> None:
        """`agent` raises as `MovableEngine.kv_agent`."""
        self._instance = instance
        self._agent = agent
        self._clock = clock
        self.status: AgentStatus | None = None
        """The agent's status when it was looked at last."""

    async def run(self) -> None:
        """Look at the transfer agent's devices every `LOOK_S` seconds until cancelled."""
        while True:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Once. An agent that does not answer is no obstacle of its own: its engine is dead or hangs, which others
        tell."""
        try:
            agent = self._agent()
        except ConfigurationError:
            return  # as it was meant to be
        except KvTransferRefused as refusal:
            self._found(str(refusal))
            return
        try:
            self.status = await agent.status()
        except PenstockError as error:
            log.debug("the KV transfer agent does not answer", extra={"reason": str(error)})
        else:
            self._found(self.status.obstacle)

    def _found(self, obstacle: str) -> None:
        former, self._instance.transfer_obstacle = self._instance.transfer_obstacle, obstacle
        if obstacle and obstacle != former:
            log.error("requests cannot be moved to or from here", extra={"reason": obstacle})
        elif former and not obstacle:
            log.warning("requests can be moved again")
