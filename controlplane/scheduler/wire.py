"""From protobuf messages to the values that policies and tables work with."""

from controlplane.load_message import instance_phase
from controlplane.model.frontend_links import NOBODY
from controlplane.model.instance import InstanceDescription, KvBlocks
from controlplane.model.placement import PlacementRequest
from penstock.v1 import monitor_pb2, scheduler_pb2, worker_pb2


def instance_description(message: worker_pb2.InstanceDescription) -> InstanceDescription:
    """What a worker announces of its instance; facts that hold for one incarnation."""
    return InstanceDescription(
        instance_id=message.instance_id,
        incarnation_id=message.incarnation_id,
        address=message.address,
        model=message.model,
        model_path=message.model_path,
        engine=message.engine,
        block_tokens=message.block_tokens,
        kv_blocks=message.kv_blocks,
        max_model_len_tokens=message.max_model_len_tokens,
        max_batch_requests=message.max_batch_requests,
        max_step_tokens=message.max_step_tokens,
        phase=instance_phase(message.phase),
        tensor_parallel=message.tensor_parallel or 1,
        pipeline_parallel=message.pipeline_parallel or 1,
    )


def kv_blocks(message: monitor_pb2.KvUpdate) -> KvBlocks:
    """The change of a prefix cache."""
    return KvBlocks(tuple(message.stored), tuple(message.removed), message.cleared)


def decode_request(
    message: scheduler_pb2.PlaceDecodeRequest, now_s: float, unreachable_instance_ids: frozenset[str] = NOBODY
) -> PlacementRequest:
    """The request whose prompt is computed, as of now."""
    return PlacementRequest(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        now_s=now_s,
        max_tokens=message.max_tokens,
        priority=message.priority,
        unreachable_instance_ids=unreachable_instance_ids,
    )


def placement_request(
    message: scheduler_pb2.PlaceRequest, now_s: float, unreachable_instance_ids: frozenset[str] = NOBODY
) -> PlacementRequest:
    """The request, to be placed now."""
    return PlacementRequest(
        request_id=message.request_id,
        model=message.model,
        prompt_tokens=message.prompt_tokens,
        now_s=now_s,
        block_hashes=list(message.block_hashes),
        max_tokens=message.max_tokens,
        priority=message.priority,
        excluded_instance_ids=frozenset(message.excluded_instance_ids),
        unreachable_instance_ids=unreachable_instance_ids,
        is_decoding=message.is_decoding,
    )
