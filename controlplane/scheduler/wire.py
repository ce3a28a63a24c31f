"""Messages to values."""

from controlplane.model.instance import InstanceDescription, InstanceState, KvBlocks, LoadReport
from controlplane.model.placement import PlacementRequest
from penstock.v1 import monitor_pb2, scheduler_pb2, worker_pb2

STATES = {
    worker_pb2.INSTANCE_STATE_STARTING: InstanceState.STARTING,
    worker_pb2.INSTANCE_STATE_READY: InstanceState.READY,
    worker_pb2.INSTANCE_STATE_DRAINING: InstanceState.DRAINING,
}
STATE_MESSAGES = {state: code for code, state in STATES.items()}


def instance_description(message: worker_pb2.InstanceDescription) -> InstanceDescription:
    """The instance's facts."""
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
    )


def load_report(message: worker_pb2.LoadReport) -> LoadReport:
    """The load, without state and admitted requests."""
    return LoadReport(
        message.running_requests,
        message.queued_requests,
        message.queued_prefill_tokens,
        message.running_tokens,
        message.kv_blocks_used,
        message.generated_tokens_total,
        message.prefilled_tokens_total,
        message.preemptions_total,
        message.step_ms,
        message.finished_requests_total,
    )


def load_message(load: LoadReport, state: InstanceState) -> worker_pb2.LoadReport:
    """The way back, for whoever asks for the snapshot."""
    return worker_pb2.LoadReport(
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        queued_prefill_tokens=load.queued_prefill_tokens,
        running_tokens=load.running_tokens,
        kv_blocks_used=load.kv_blocks_used,
        generated_tokens_total=load.generated_tokens_total,
        prefilled_tokens_total=load.prefilled_tokens_total,
        preemptions_total=load.preemptions_total,
        step_ms=load.step_ms,
        finished_requests_total=load.finished_requests_total,
        state=STATE_MESSAGES[state],
    )


def instance_state(code: worker_pb2.InstanceState) -> InstanceState:
    """A state this version does not know is one in which nothing may be placed."""
    return STATES.get(code, InstanceState.STARTING)


def kv_blocks(message: monitor_pb2.KvUpdate) -> KvBlocks:
    """The change of a prefix cache."""
    return KvBlocks(tuple(message.stored), tuple(message.removed), message.cleared)


def placement_request(message: scheduler_pb2.PlaceRequest, now_s: float) -> PlacementRequest:
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
    )
