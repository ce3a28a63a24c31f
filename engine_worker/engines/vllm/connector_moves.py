"""How KV comes to and leaves a vLLM that has our connector, whoever started it: exports and imports of requests, cached
prefixes, and the control channel that they share."""

from collections.abc import Callable, Mapping

from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.adapters import VllmAdapters
from engine_worker.engines.vllm.agent_proxy import AgentProxy
from engine_worker.engines.vllm.carriers import UnreadRequests
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import FreeBlocks, Held, Notice, PausedNotice, Published, Unstage
from engine_worker.engines.vllm.exports import Exports
from engine_worker.engines.vllm.imports import Imports
from engine_worker.engines.vllm.prefixes import VllmPrefixes
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.kv.addresses import join
from engine_worker.kv.transfer import AgentDescription


class ConnectorMoves:
    """`exports`, `imports` and `prefixes` exist once `_begin` was called."""

    exports: Exports
    imports: Imports
    prefixes: VllmPrefixes

    def __init__(
        self,
        endpoint: str,
        host: str,
        requests: Mapping[str, EngineRequestState],
        go_on: Callable[[EngineRequestState], None],
        *,
        connects: bool = False,
    ) -> None:
        """`endpoint`: of the control channel, to which this side `connects` or the engine core does; `host`: where the
        transfer agent is reached. `go_on` submits a paused request again."""
        self._channel = CoreChannel(endpoint, self._notice, connects=connects)
        self._host = host
        self._requests = requests
        self._go_on = go_on
        self.agent = AgentProxy(self._channel)
        self.kv_block_bytes = 0

    @property
    def kv_address(self) -> str:
        """host:port of the transfer agent in the engine core, or a port for each rank; known once that is described."""
        return join(self._host, *self.agent.ports)

    async def free_blocks(self) -> int:
        """KV blocks that no request holds now."""
        return int(await self._channel.call(FreeBlocks()))

    def unstage(self, migration_id: str) -> None:
        """Free the staging memory of a migration that came to nothing at the last moment."""
        self._channel.send(Unstage(migration_id))

    def fail(self, reason: str) -> None:
        """The engine is dead: everything that waits for it fails with this reason."""
        self._channel.fail(reason)
        if hasattr(self, "exports"):
            self.exports.fail(reason, tuple(self._requests.values()))

    async def close(self) -> None:
        """End everything that waits for the engine core."""
        await self._channel.close()

    def _begin(
        self, core: UnreadRequests, limits: EngineLimits, adapters: VllmAdapters | None, about: AgentDescription
    ) -> None:
        """Once the agent in the engine core was described."""
        self.kv_block_bytes = about.layout.block_bytes
        self.exports = Exports(self._channel, core, limits.block_tokens, self._go_on)
        self.imports = Imports(self._channel, core, limits)
        self.prefixes = VllmPrefixes(self._channel, core, limits, adapters)

    def _notice(self, notice: Notice) -> None:
        match notice:
            case Published():
                self.exports.published(notice)
            case PausedNotice():
                self.exports.noticed(notice, self._requests.get(notice.request_id))
            case Held():
                self.prefixes.held(notice)
            case _:
                pass  # what only a server that runs by itself, or only an own engine core, has to tell
