"""Values to messages and back. Token deltas are the hot path: 0.5 us each, which is why messages are filled
field by field (three times faster in upb than keyword construction)."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from controlplane.load_message import phase_code
from controlplane.media_message import prompt_media, prompt_media_message
from controlplane.model.adapter import Adapter
from controlplane.model.instance import InstanceDescription, KvBlocks, KvTier
from controlplane.model.queue_belief import QueueBelief
from controlplane.model.request import (
    NO_TENANT,
    EngineRequest,
    FinishReason,
    PositionLogprobs,
    PrefixSource,
    Resume,
    Tenant,
    TokenLogprob,
)
from controlplane.sampling_message import sampling_message, sampling_params
from engine_worker.deltas import Delta, Failure, FailureCode
from engine_worker.engines.pooling import PoolingParameters, known_tasks
from engine_worker.request_table import Adoption, TrackedRequest
from engine_worker.step_watch import StepBatch
from mesh.errors import RequestRefused
from penstock.v1 import monitor_pb2, request_pb2, worker_pb2

MAX_ADOPTED_MEDIA_BYTES: Final = 8 * 1024 * 1024
"""Of images and the like that are told to a frontend which adopts a request; half of what a stream may lag behind."""
_FINISH_REASONS = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: request_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: request_pb2.FINISH_REASON_ERROR,
}
_ERROR_CODES = {
    FailureCode.REFUSED: request_pb2.ERROR_CODE_REFUSED,
    FailureCode.UNAVAILABLE: request_pb2.ERROR_CODE_UNAVAILABLE,
    FailureCode.ENGINE: request_pb2.ERROR_CODE_ENGINE,
    FailureCode.DEADLINE: request_pb2.ERROR_CODE_DEADLINE,
    FailureCode.LOST: request_pb2.ERROR_CODE_LOST,
    FailureCode.ADOPTED: request_pb2.ERROR_CODE_ADOPTED,
    FailureCode.BOUNCED: request_pb2.ERROR_CODE_BOUNCED,
}


def engine_request(message: request_pb2.GenerateRequest) -> EngineRequest:
    """The request inside a message; nothing is checked here (see `admission`)."""
    return EngineRequest(
        request_id=message.request_id,
        prompt_token_ids=tuple(message.prompt_token_ids),
        sampling=sampling_params(message.sampling),
        emitted_token_ids=tuple(message.emitted_token_ids),
        priority=message.priority,
        resume=Resume(message.resume.client_request_id, message.resume.ticket) if message.HasField("resume") else None,
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        media=prompt_media(message.media) if message.HasField("media") else None,
        adapter=adapter_of(message.adapter) if message.HasField("adapter") else None,
        tenant=tenant_of(message.tenant),
    )


def tenant_of(message: request_pb2.Tenant) -> Tenant:
    """The tenant inside a message; one without a share that can be has a single one."""
    return Tenant(message.name, message.share if 0 < message.share < math.inf else 1.0)


def prefix_source(message: request_pb2.GenerateRequest) -> PrefixSource | None:
    """Whose cached prefix the request is to begin with; None: nobody's but the instance's own."""
    prefix = message.prefix
    return PrefixSource(prefix.instance_id, prefix.tokens, prefix.comes_ms) if message.HasField("prefix") else None


def queue_belief(message: request_pb2.GenerateRequest) -> QueueBelief | None:
    """What was believed of this instance when the request was placed here; None: it was placed without a look."""
    if not message.HasField("belief"):
        return None
    belief = message.belief
    return QueueBelief(belief.queued_prefill_tokens, belief.new_prefill_tokens, belief.may_bounce)


def adapter_of(message: request_pb2.Adapter) -> Adapter:
    """The adapter inside a message."""
    return Adapter(message.name, message.digest, message.path, message.is_3d_lora_weight)


def generate_message(
    request: EngineRequest, *, model: str, deadline_ms: int, epoch: int
) -> request_pb2.GenerateRequest:
    """A request for another process to go on with; `deadline_ms` is what is left of its time, 0: it has no deadline."""
    message = request_pb2.GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        emitted_token_ids=request.emitted_token_ids,
        sampling=sampling_message(request.sampling),
        priority=request.priority,
        deadline_ms=deadline_ms,
        model=model,
        epoch=epoch,
        cache_salt=request.cache_salt,
        traceparent=request.traceparent,
    )
    if request.resume is not None:
        message.resume.client_request_id = request.resume.client_request_id
        message.resume.ticket = request.resume.ticket
    if request.media is not None:
        message.media.CopyFrom(prompt_media_message(request.media))
    if request.tenant != NO_TENANT:
        message.tenant.name, message.tenant.share = request.tenant.name, request.tenant.share
    if (adapter := request.adapter) is not None:
        message.adapter.name, message.adapter.digest, message.adapter.path = adapter.name, adapter.digest, adapter.path
        message.adapter.is_3d_lora_weight = adapter.is_3d_lora_weight
    return message


def adopted_message(
    client_request_id: str, question: int, requests: Sequence[Adoption], *, model: str, now_s: float
) -> worker_pb2.WorkerMessage:
    """The answer to a frontend that goes on with a client's request: what was found of it here."""
    message = worker_pb2.WorkerMessage()
    message.adopted.client_request_id = client_request_id
    message.adopted.question = question
    left_bytes = MAX_ADOPTED_MEDIA_BYTES
    for adoption in requests:
        left_s = 0.0 if adoption.deadline_s is None else max(0.001, adoption.deadline_s - now_s)
        added = message.adopted.requests.add()
        added.request.CopyFrom(
            generate_message(adoption.request, model=model, deadline_ms=round(1000 * left_s), epoch=adoption.epoch)
        )
        left_bytes -= adoption.request.media.content_bytes if adoption.request.media is not None else 0
        if left_bytes < 0:  # it would cut the stream off; the request goes on here, and nowhere else
            for item in added.request.media.items:
                item.ClearField("content")
        added.is_ended = adoption.is_ended
        if adoption.finish_reason is not None:
            added.finish_reason = _FINISH_REASONS[adoption.finish_reason]
        if adoption.cached_tokens is not None:
            added.cached_tokens = adoption.cached_tokens
    return message


def step_message(
    deltas: Sequence[Delta], epochs: Mapping[str, int], before: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> worker_pb2.WorkerMessage:
    """What one engine step brought for one stream; `epochs` by request, 0 for those that are not in it; `before` for
    requests that were taken over just now."""
    message = worker_pb2.WorkerMessage()
    step = message.step
    step.SetInParent()
    add = step.deltas.add
    for delta in deltas:
        added = add()
        added.request_id = delta.request_id
        added.offset = delta.offset
        if delta.request_id in epochs:
            added.epoch = epochs[delta.request_id]
        if delta.request_id in before:
            added.emitted_token_ids.extend(before[delta.request_id])
        if isinstance(delta, Failure):
            added.finish_reason = request_pb2.FINISH_REASON_ERROR
            added.error.code = _ERROR_CODES[delta.code]
            added.error.message = delta.message
            if delta.present is not None:
                added.error.present.queued_prefill_tokens = delta.present.queued_prefill_tokens
                added.error.present.requests = delta.present.requests
            continue
        added.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            _add_logprobs(added.logprobs, delta.logprobs)
        if delta.prompt_logprobs:
            _add_logprobs(added.prompt_logprobs, delta.prompt_logprobs)
        if delta.cached_tokens is not None:
            added.cached_tokens = delta.cached_tokens
        if delta.finish_reason is not None:
            added.finish_reason = _FINISH_REASONS[delta.finish_reason]
            if delta.finish_reason is FinishReason.ERROR:
                added.error.code = (
                    request_pb2.ERROR_CODE_UNAVAILABLE if delta.may_go_elsewhere else request_pb2.ERROR_CODE_ENGINE
                )
                added.error.message = delta.error
    return message


def hello_message(instance_id: str, incarnation_id: str) -> worker_pb2.WorkerMessage:
    """The worker's answer to a frontend's hello."""
    hello = worker_pb2.WorkerHello(instance_id=instance_id, incarnation_id=incarnation_id)
    return worker_pb2.WorkerMessage(hello=hello)


def moved_message(request_id: str, instance_id: str, incarnation_id: str, epoch: int) -> worker_pb2.WorkerMessage:
    """A request lives elsewhere from now on."""
    moved = worker_pb2.RequestMoved(
        request_id=request_id, instance_id=instance_id, incarnation_id=incarnation_id, epoch=epoch
    )
    return worker_pb2.WorkerMessage(moved=moved)


def heartbeat_message(stalled_s: float) -> worker_pb2.WorkerMessage:
    """A sign of life on a stream that has nothing else to say."""
    return worker_pb2.WorkerMessage(heartbeat=worker_pb2.Heartbeat(stalled_ms=round(1000 * stalled_s)))


def description_message(instance: InstanceDescription) -> worker_pb2.InstanceDescription:
    """An instance's description as its protobuf message."""
    return worker_pb2.InstanceDescription(
        instance_id=instance.instance_id,
        incarnation_id=instance.incarnation_id,
        address=instance.address,
        model=instance.model,
        model_path=instance.model_path,
        engine=instance.engine,
        block_tokens=instance.block_tokens,
        kv_blocks=instance.kv_blocks,
        max_model_len_tokens=instance.max_model_len_tokens,
        max_batch_requests=instance.max_batch_requests,
        max_step_tokens=instance.max_step_tokens,
        phase=phase_code(instance.phase),
        tensor_parallel=instance.tensor_parallel,
        pipeline_parallel=instance.pipeline_parallel,
        device=instance.device,
        max_loras=instance.max_loras,
        host_store_id=instance.host_store_id,
        kv_token_bytes=instance.kv_token_bytes,
        pulls_prefixes=instance.pulls_prefixes,
    )


_TIERS = {
    KvTier.ENGINE: monitor_pb2.KV_TIER_ENGINE,
    KvTier.HOST: monitor_pb2.KV_TIER_HOST,
    KvTier.DISK: monitor_pb2.KV_TIER_DISK,
}


def kv_update_message(change: KvBlocks) -> monitor_pb2.KvUpdate:
    """A change of what is cached."""
    return monitor_pb2.KvUpdate(
        stored=change.stored, removed=change.removed, cleared=change.cleared, tier=_TIERS[change.tier]
    )


def running_request_message(tracked: TrackedRequest, now_s: float) -> worker_pb2.RunningRequest:
    """A request as an operator sees it."""
    return worker_pb2.RunningRequest(
        request_id=tracked.request.request_id,
        prompt_tokens=len(tracked.request.prompt_token_ids),
        generated_tokens=len(tracked.emitted_token_ids),
        frontend_id=tracked.frontend_id,
        age_ms=round(1000 * (now_s - tracked.admitted_s)),
        remaining_tokens=tracked.remaining_tokens,
    )


def step_samples_message(batch: StepBatch) -> worker_pb2.StepSamples:
    """Step samples as the message that a watcher gets."""
    return worker_pb2.StepSamples(
        steps=[
            worker_pb2.StepSample(
                duration_ms=sample.duration_ms,
                prefill_tokens=sample.prefill_tokens,
                attended_pairs=sample.attended_pairs,
                decode_requests=sample.decode_requests,
                context_tokens=sample.context_tokens,
                longest_context_tokens=sample.longest_context_tokens,
            )
            for sample in batch.samples
        ],
        lost=batch.lost,
    )


def _add_logprobs(message: Any, positions: Sequence[PositionLogprobs]) -> None:
    """`message` is a repeated field of them, whose type is none that can be named."""
    for position in positions:
        added = message.add()
        _set_logprob(added.chosen, position.chosen)
        for rival in position.top:
            _set_logprob(added.top.add(), rival)


def _set_logprob(message: request_pb2.TokenLogprob, value: TokenLogprob) -> None:
    message.token_id = value.token_id
    message.logprob = value.logprob
    message.rank = value.rank


def pooling_parameters(message: worker_pb2.PoolRequest) -> PoolingParameters:
    """Those of all its prompts. Raises RequestRefused for a task that there is not."""
    tasks = known_tasks([message.task])
    if not tasks:
        raise RequestRefused(f"{message.task!r} is no pooling task")
    return PoolingParameters(
        tasks[0],
        message.dimensions if message.HasField("dimensions") else None,
        message.use_activation if message.HasField("use_activation") else None,
        message.cache_salt,
    )


def pool_response(results: Sequence[NDArray[np.float32]]) -> worker_pb2.PoolResponse:
    """Rows as little-endian floats, whatever this machine has."""
    return worker_pb2.PoolResponse(
        prompts=[
            worker_pb2.PooledPrompt(values=result.astype("<f4").tobytes(), columns=result.shape[-1])
            for result in results
        ]
    )
