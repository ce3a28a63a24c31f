"""The class that vLLM loads: once for each of its two sides, in the engine core and beside the model, which are one
process unless the model is spread over several ranks."""

import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from engine_worker.engines.vllm.connector.bridge import CoreBridge, bridge_of
from engine_worker.engines.vllm.connector.endpoint import TOKEN_VARIABLE
from engine_worker.engines.vllm.connector.kv_groups import movement_obstacle
from engine_worker.engines.vllm.connector.memory import RankShape
from engine_worker.engines.vllm.connector.metadata import ConnectorMetadata
from engine_worker.engines.vllm.connector.rank_bridge import RankBridge
from engine_worker.engines.vllm.connector.scheduler_side import SchedulerSide
from engine_worker.engines.vllm.connector.settings import connector_settings
from engine_worker.engines.vllm.connector.worker_side import WorkerSide


class PenstockConnector(KVConnectorBase_V1):
    """Translates vLLM's hooks; whatever is decided is decided in the sides."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel, blocks = vllm_config.parallel_config, kv_cache_config.num_blocks
        # One rank, too, where vLLM runs it in a process of its own, as it does on a CPU unless it is told not to.
        is_spread = parallel.distributed_executor_backend != "uni"
        settings = connector_settings(
            vllm_config.kv_transfer_config.kv_connector_extra_config,
            model=vllm_config.model_config.model,
            device=vllm_config.device_config.device_type,
            is_spread=is_spread,
            token=os.environ.get(TOKEN_VARIABLE, ""),
        ).of_core(parallel.data_parallel_index, parallel.world_size)
        block_tokens = vllm_config.cache_config.block_size
        self._scheduler: Any = None
        self._worker: Any = None
        self._ranks: CoreBridge | None = None
        if role is KVConnectorRole.SCHEDULER:
            bridge = bridge_of(settings.endpoint, listens=settings.listens)
            bridge.obstacle = movement_obstacle(kv_cache_config)
            if is_spread:
                bridge.start_ranks(blocks=blocks, staging_blocks=settings.staging_blocks, ranks=parallel.world_size)
                self._ranks = bridge
            self._scheduler = SchedulerSide(bridge, block_tokens)
        else:
            shape = _shape(vllm_config)
            self._worker = WorkerSide(
                RankBridge(settings.endpoint, shape.rank)
                if is_spread
                else bridge_of(settings.endpoint, listens=settings.listens),
                shape=shape,
                blocks=blocks,
                block_tokens=block_tokens,
                settings=settings,
            )

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        matched: tuple[int | None, bool] = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.kv_transfer_params:
            self._scheduler.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def has_pending_block_frees(self) -> bool:
        return bool(self._scheduler.has_pinned_blocks)

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
        if self._ranks is not None:
            self._ranks.stop()


def _shape(vllm_config: Any) -> RankShape:
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if parallel.world_size == 1:
        return RankShape(total_heads=model.get_total_num_kv_heads(), has_latents=model.use_mla)
    tensor, pipeline = get_tp_group(), get_pp_group()
    return RankShape(
        tensor.rank_in_group,
        tensor.world_size,
        pipeline.rank_in_group,
        pipeline.world_size,
        model.get_total_num_kv_heads(),
        model.use_mla,
    )
