"""An instance's load and state on the wire, the same for the worker that reports and the scheduler that listens."""

from collections.abc import Sequence

from controlplane.model.adapter import NO_ADAPTERS, AdapterLoad
from controlplane.model.instance import InstancePhase, InstanceState, LoadReport
from controlplane.model.pull_totals import NO_PULLS, PullTotals
from penstock.v1 import worker_pb2

_STATES = {
    worker_pb2.INSTANCE_STATE_STARTING: InstanceState.STARTING,
    worker_pb2.INSTANCE_STATE_READY: InstanceState.READY,
    worker_pb2.INSTANCE_STATE_DRAINING: InstanceState.DRAINING,
}
_CODES = {state: code for code, state in _STATES.items()}
_PHASES = {
    worker_pb2.INSTANCE_PHASE_UNSPECIFIED: InstancePhase.ANY,
    worker_pb2.INSTANCE_PHASE_PREFILL: InstancePhase.PREFILL,
    worker_pb2.INSTANCE_PHASE_DECODE: InstancePhase.DECODE,
}
_PHASE_CODES = {phase: code for code, phase in _PHASES.items()}


def instance_state(code: worker_pb2.InstanceState) -> InstanceState:
    """A state this version does not know is one in which nothing may be placed."""
    return _STATES.get(code, InstanceState.STARTING)


def state_code(state: InstanceState) -> worker_pb2.InstanceState:
    """The way back."""
    return _CODES[state]


def instance_phase(code: worker_pb2.InstancePhase) -> InstancePhase:
    """A phase this version does not know restricts nothing."""
    return _PHASES.get(code, InstancePhase.ANY)


def phase_code(phase: InstancePhase) -> worker_pb2.InstancePhase:
    """The way back."""
    return _PHASE_CODES[phase]


def load_report(message: worker_pb2.LoadReport) -> LoadReport:
    """The load, without state and names of requests."""
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
        message.decoding_requests,
        message.token_interval_ms,
        message.transfer_obstacle,
        _adapters(message),
        message.engine_hit_tokens_total,
        message.host_hit_tokens_total,
        message.host_load_token_ms,
        message.disk_hit_tokens_total,
        pulls=_pulls(message),
    )


def _pulls(message: worker_pb2.LoadReport) -> PullTotals:
    if not message.HasField("pulls"):
        return NO_PULLS
    told = message.pulls
    return PullTotals(told.pulled_total, told.computed_total, told.tokens_total, told.token_ms, told.compute_token_ms)


def _adapters(message: worker_pb2.LoadReport) -> AdapterLoad:
    if not (message.adapters_in_use or message.idle_adapters or message.refused_adapters):
        return NO_ADAPTERS
    return AdapterLoad(tuple(message.adapters_in_use), tuple(message.idle_adapters), tuple(message.refused_adapters))


def load_message(
    load: LoadReport,
    state: InstanceState,
    admitted_request_ids: Sequence[str] = (),
    ended_request_ids: Sequence[str] = (),
) -> worker_pb2.LoadReport:
    """The load, with the ids of requests that it counts for the first time, and of those that it counts no more."""
    pulls = load.pulls
    told = worker_pb2.PrefixPullTotals(
        pulled_total=pulls.pulled,
        computed_total=pulls.computed,
        tokens_total=pulls.tokens,
        token_ms=pulls.token_ms,
        compute_token_ms=pulls.compute_token_ms,
    )
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
        decoding_requests=load.decoding_requests,
        token_interval_ms=load.token_interval_ms,
        transfer_obstacle=load.transfer_obstacle,
        adapters_in_use=load.adapters.in_use,
        idle_adapters=load.adapters.idle,
        refused_adapters=load.adapters.refused,
        engine_hit_tokens_total=load.engine_hit_tokens_total,
        host_hit_tokens_total=load.host_hit_tokens_total,
        host_load_token_ms=load.host_load_token_ms,
        disk_hit_tokens_total=load.disk_hit_tokens_total,
        pulls=None if pulls == NO_PULLS else told,
        state=_CODES[state],
        admitted_request_ids=admitted_request_ids,
        ended_request_ids=ended_request_ids,
    )
