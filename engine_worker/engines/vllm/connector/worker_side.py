"""The connector's worker side: carries out a step's orders on the KV tensors. Runs on vLLM's engine loop."""

from typing import Any

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.memory import EngineMemory, RankShape
from engine_worker.engines.vllm.connector.metadata import ConnectorMetadata
from engine_worker.engines.vllm.connector.rank_bridge import RankBridge
from engine_worker.engines.vllm.connector.settings import ConnectorSettings
from engine_worker.engines.vllm.hidden_states.extension import extended_workers, sees_logits
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS
from engine_worker.host_tier.settings import HostTierSettings, parse_disk
from engine_worker.kv.settings import GATHERED_BYTES, Device, KvTransferSettings
from engine_worker.kv.ucx_environment import has_cuda_transport, load_ucx


class WorkerSide:
    """Beside the model: in the engine core's process, or in each rank's where it is spread over several."""

    def __init__(
        self,
        bridge: CoreBridge | RankBridge,
        *,
        shape: RankShape,
        blocks: int,
        block_tokens: int,
        settings: ConnectorSettings,
    ) -> None:
        self._bridge = bridge
        self._shape = shape
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._settings = settings
        self._memory: EngineMemory | None = None
        self._capture_steps: int | None = None
        """What `capture` was asked last and no step has heard yet."""
        bridge.capture = self.capture

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The tensors exist: serve them. Raises `ConfigurationError` where they cannot be."""
        about = self._settings
        self._memory = EngineMemory(
            kv_caches,
            blocks=self._blocks,
            staging_blocks=about.staging_blocks,
            model=about.model,
            block_tokens=self._block_tokens,
            shape=self._shape,
            sends_device_memory=about.device == "cuda" and has_cuda_transport(load_ucx("cuda")),
        )
        device: Device = "cuda" if about.device == "cuda" else "cpu"
        # UCX takes the port above, too.
        port = about.port and about.port + 2 * self._shape.rank
        transfers = KvTransferSettings(about.host, port, device, gathered_bytes=GATHERED_BYTES[device])
        self._bridge.start(self._memory, transfers)
        if about.host_key and isinstance(self._bridge, CoreBridge):
            host = HostTierSettings(about.host_kv_bytes, about.host_kv_dir, *parse_disk(about.disk_kv))
            self._bridge.serve_host(self._memory, about.host_key, host)

    def capture(self, every_steps: int) -> str:
        """Send every `every_steps`-th step's hidden states from the next step on, 0: none. Returns why that cannot be
        done, empty if it can, or if they are another rank's. On the bridge's loop."""
        workers = extended_workers()
        if not workers:
            return f"the server was started without --worker-extension-cls {EXTENSION_CLASS}"
        if not sees_logits():
            return ""
        reason = workers[0].penstock_obstacle()
        if not reason:
            self._capture_steps = every_steps
        return reason

    def break_exports(self, orders: ConnectorMetadata) -> None:
        """Before a step that overwrites exported blocks: wait until no peer reads them, which is bounded."""
        if orders.broken:
            self._bridge.withdraw_now(orders.broken)

    def start(self, orders: ConnectorMetadata) -> None:
        """Before the step if it has `fills`, otherwise after it was launched."""
        if self._capture_steps is not None:
            every_steps, self._capture_steps = self._capture_steps, None
            tell_states = self._bridge.tell_states
            extended_workers()[0].penstock_install(lambda: tell_states, every_steps)
        for fill in orders.fills:
            assert self._memory is not None, "vLLM registers its KV caches before the first step"
            self._memory.fill(fill.staging_ids, fill.block_ids)
        for migration_id in orders.unstaged:
            self._bridge.unstage_later(migration_id)
        for held in orders.held:
            self._bridge.publish_hold(held)
        for load in orders.loads:
            self._bridge.load(load)
        for host_load in orders.host_loads:
            assert isinstance(self._bridge, CoreBridge), "there is no host tier of several ranks"
            assert self._bridge.host is not None, "the scheduler side loads from it"
            self._bridge.host.load(host_load)

    def stop(self) -> None:
        """End the transfer agent and its thread. Called when the engine core shuts down."""
        self._bridge.stop()
