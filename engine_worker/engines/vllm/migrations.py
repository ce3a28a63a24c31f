"""How requests migrate to and from one vLLM engine: exports, imports and the control channel that they share."""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from engine_worker.engines.interface import EngineLimits
from engine_worker.engines.vllm.agent_proxy import AgentProxy
from engine_worker.engines.vllm.connector.channel import CoreChannel
from engine_worker.engines.vllm.connector.messages import FreeBlocks, PausedNotice, Published, Unstage
from engine_worker.engines.vllm.environment import Device
from engine_worker.engines.vllm.exports import Exports
from engine_worker.engines.vllm.imports import Imports
from engine_worker.engines.vllm.running import EngineRequestState
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.kv.ucx_environment import UCX_PACKAGE

if TYPE_CHECKING:
    from engine_worker.engines.vllm.core import Core


class Migrations:
    """`exports` and `imports` exist once `start` has returned."""

    exports: Exports
    imports: Imports

    def __init__(
        self,
        endpoint: str,
        host: str,
        requests: Mapping[str, EngineRequestState],
        go_on: Callable[[EngineRequestState], None],
    ) -> None:
        """Before the engine core is started. `go_on` submits a paused request again."""
        self._channel = CoreChannel(endpoint, self._notice)
        self._host = host
        self._requests = requests
        self._go_on = go_on
        self.agent = AgentProxy(self._channel)
        self.kv_block_bytes = 0

    async def start(self, core: "Core", limits: EngineLimits) -> None:
        """Ask the agent in the engine core for its layout. Call once the engine core runs; `exports` and `imports`
        exist afterwards."""
        self.exports = Exports(self._channel, core, limits.block_tokens, self._go_on)
        self.imports = Imports(self._channel, core, limits)
        about = await self.agent.describe()
        self.kv_block_bytes = about.layout.block_bytes

    @property
    def kv_address(self) -> str:
        """host:port of the transfer agent in the engine core; known after `start`."""
        return f"{self._host}:{self.agent.port}"

    async def free_blocks(self) -> int:
        """KV blocks that no request holds now."""
        return int(await self._channel.call(FreeBlocks()))

    def unstage(self, migration_id: str) -> None:
        """Free the staging memory of a migration that came to nothing at the last moment."""
        self._channel.send(Unstage(migration_id))

    def fail(self, reason: str) -> None:
        """The engine is dead: everything that waits for it fails with this reason."""
        self._channel.fail(reason)
        self.exports.fail(reason, tuple(self._requests.values()))

    async def close(self) -> None:
        """End everything that waits for the engine core."""
        await self._channel.close()

    def _notice(self, notice: Published | PausedNotice) -> None:
        if isinstance(notice, Published):
            self.exports.published(notice)
            return
        self.exports.noticed(notice, self._requests.get(notice.request_id))


CHANGE_KV: Final = frozenset(
    "data_parallel_size decode_context_parallel_size prefill_context_parallel_size speculative_config".split()
)
"""Arguments of vLLM that spread KV over processes, or have steps compute KV of tokens that are taken back."""


def migration_obstacle(settings: VllmSettings, device: Device) -> str | None:
    """Why requests cannot migrate to and from this engine; None if they can."""
    if not settings.movable:
        return "the settings say so"
    if settings.runner == "pooling":
        return "a pooling model's prompts are asked again elsewhere"
    if find_spec("ucxx") is None:
        return f"UCX is not installed: pip install {UCX_PACKAGE}"
    if settings.tensor_parallel_size * settings.pipeline_parallel_size > 1:
        return "its KV is spread over several processes (tensor or pipeline parallel is more than 1)"
    given = {argument.partition("=")[0].partition(".")[0] for argument in settings.others}
    if unknown := sorted(given & CHANGE_KV):
        return f"it has not been tried with {' and '.join(unknown)}"
    return None
