"""The connector's worker side: carries out a step's orders on the KV tensors. Runs on vLLM's engine loop."""

from typing import Any

from engine_worker.engines.vllm.connector.bridge import CoreBridge
from engine_worker.engines.vllm.connector.memory import EngineMemory
from engine_worker.engines.vllm.connector.metadata import ConnectorMetadata


class WorkerSide:
    """Beside the model, in the engine core's process."""

    def __init__(self, bridge: CoreBridge, *, blocks: int, block_tokens: int, extra: dict[str, Any]) -> None:
        self._bridge = bridge
        self._blocks = blocks
        self._block_tokens = block_tokens
        self._extra = extra
        self._memory: EngineMemory | None = None

    def register(self, kv_caches: dict[str, Any]) -> None:
        """The tensors exist: serve them. Raises `ConfigurationError` where they cannot be."""
        self._memory = EngineMemory(
            kv_caches,
            blocks=self._blocks,
            staging_blocks=self._extra["staging_blocks"],
            model=self._extra["model"],
            block_tokens=self._block_tokens,
        )
        self._bridge.start(self._memory, port=self._extra["port"], device=self._extra["device"])

    def break_exports(self, orders: ConnectorMetadata) -> None:
        """Before a step that overwrites exported blocks: wait until no peer reads them, which is bounded."""
        if orders.broken:
            self._bridge.withdraw_now(orders.broken)

    def start(self, orders: ConnectorMetadata) -> None:
        """Before the step if it has `fills`, otherwise after it was launched."""
        for fill in orders.fills:
            assert self._memory is not None, "vLLM registers its KV caches before the first step"
            self._memory.fill(fill.staging_ids, fill.block_ids)
        for migration_id in orders.unstaged:
            self._bridge.unstage_later(migration_id)
        for load in orders.loads:
            self._bridge.load(load)

    def stop(self) -> None:
        """End the transfer agent and its thread. Called when the engine core shuts down."""
        self._bridge.stop()
