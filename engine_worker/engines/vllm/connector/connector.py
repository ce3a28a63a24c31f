"""The class that vLLM loads, in the engine core, once for each of its two sides."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from engine_worker.engines.vllm.connector.bridge import bridge_of
from engine_worker.engines.vllm.connector.metadata import ConnectorMetadata
from engine_worker.engines.vllm.connector.scheduler_side import SchedulerSide
from engine_worker.engines.vllm.connector.worker_side import WorkerSide


class PenstockConnector(KVConnectorBase_V1):
    """Translates vLLM's hooks; whatever is decided is decided in the sides."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        bridge = bridge_of(extra["endpoint"])
        block_tokens = vllm_config.cache_config.block_size
        self._scheduler: Any = None
        self._worker: Any = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(bridge, block_tokens)
        else:
            self._worker = WorkerSide(bridge, blocks=kv_cache_config.num_blocks, block_tokens=block_tokens, extra=extra)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched: tuple[int, bool] = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.kv_transfer_params:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        orders: ConnectorMetadata = self._scheduler.step_metadata(scheduler_output)
        return orders

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids), None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._worker.break_exports(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are over before the step begins."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Required by vLLM. Does nothing: peers read the blocks themselves."""

    def wait_for_save(self) -> None:
        """Required by vLLM. Returns at once: peers pull blocks themselves, so no step saves any."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        orders: Any = self._get_connector_metadata()
        return orders.sent or None, orders.received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        orders: Any = self._get_connector_metadata()
        return set(orders.failed_blocks)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.stop()
