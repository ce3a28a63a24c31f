"""From protobuf messages to the values that policies and tables work with, and back."""

from math import isfinite

from controlplane.load_message import instance_phase
from controlplane.model.frontend_links import NOBODY
from controlplane.model.instance import InstanceDescription, KvBlocks, KvTier
from controlplane.model.placement import PlacementRequest
from controlplane.model.queue_belief import PresentLoad, QueueBelief
from controlplane.model.shared_event import MAX_SHARED_MARKS, SharedEvent, SharedKind
from penstock.v1 import monitor_pb2, request_pb2, scheduler_pb2, worker_pb2


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
        device=message.device,
        max_loras=message.max_loras,
        host_store_id=message.host_store_id,
        kv_token_bytes=message.kv_token_bytes,
        pulls_prefixes=message.pulls_prefixes,
    )


_TIERS = {
    monitor_pb2.KV_TIER_ENGINE: KvTier.ENGINE,
    monitor_pb2.KV_TIER_HOST: KvTier.HOST,
    monitor_pb2.KV_TIER_DISK: KvTier.DISK,
}


def kv_blocks(message: monitor_pb2.KvUpdate) -> KvBlocks:
    """The change of what an instance has cached."""
    # A tier that a newer worker tells of is none that this scheduler could weigh: as if it held nothing.
    tier = _TIERS.get(message.tier)
    if tier is None:
        return KvBlocks(tier=KvTier.DISK)
    return KvBlocks(tuple(message.stored), tuple(message.removed), message.cleared, tier)


def present_load(message: request_pb2.PresentLoad) -> PresentLoad:
    """What an instance that has given a request back says that it has."""
    return PresentLoad(message.queued_prefill_tokens, message.requests)


def belief_message(belief: QueueBelief) -> request_pb2.QueueBelief:
    """What goes with a placed request to its worker."""
    return request_pb2.QueueBelief(
        queued_prefill_tokens=belief.queued_prefill_tokens,
        new_prefill_tokens=belief.new_prefill_tokens,
        may_bounce=belief.may_bounce,
    )


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
        adapter_digest=message.adapter_digest,
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
        adapter_digest=message.adapter_digest,
        vllm_parts=message.vllm_parts,
    )


_SHARED_KINDS = {
    SharedKind.PREFILL: scheduler_pb2.SHARED_KIND_PREFILL,
    SharedKind.DECODE: scheduler_pb2.SHARED_KIND_DECODE,
    SharedKind.ARRIVING: scheduler_pb2.SHARED_KIND_ARRIVING,
    SharedKind.ENDED: scheduler_pb2.SHARED_KIND_ENDED,
}
_SHARED_KINDS_BY_CODE = {code: kind for kind, code in _SHARED_KINDS.items()}


def shared_event_message(event: SharedEvent) -> scheduler_pb2.SharedEvent:
    """What is told to other schedulers; `origin` is in the message around it."""
    return scheduler_pb2.SharedEvent(
        kind=_SHARED_KINDS[event.kind],
        request_id=event.request_id,
        instance_id=event.instance_id,
        tokens=event.tokens,
        marks=event.marks,
        computed_ms=event.computed_ms,
    )


def shared_event(message: scheduler_pb2.SharedEvent, origin: str) -> SharedEvent | None:
    """What another scheduler tells; None: a kind of event that this release does not know."""
    kind = _SHARED_KINDS_BY_CODE.get(message.kind)
    if kind is None:
        return None
    return SharedEvent(
        kind,
        message.request_id,
        message.instance_id,
        message.tokens,
        origin,
        tuple(message.marks[:MAX_SHARED_MARKS]),
        message.computed_ms if isfinite(message.computed_ms) else 0.0,
    )
