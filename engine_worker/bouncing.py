"""Requests that are given back because more waits here than was believed. Pure."""

from controlplane.model.instance import LoadReport
from controlplane.model.queue_belief import PresentLoad, QueueBelief
from controlplane.model.request import EngineRequest
from controlplane.protocols.bouncing import is_bounced
from engine_worker.deltas import Failure, FailureCode
from engine_worker.reported_load import reported_load
from engine_worker.request_table import RequestTable


def bounce(
    request: EngineRequest, belief: QueueBelief | None, engine_load: LoadReport, table: RequestTable, slack_tokens: int
) -> Failure | None:
    """What a request's frontend is told if the worker gives it back; None if it takes it."""
    if belief is None:
        return None
    load = reported_load(engine_load, table)
    queued_tokens = table.prefills.queued_tokens(load.queued_prefill_tokens)
    present = PresentLoad(queued_tokens, load.running_requests + load.queued_requests)
    if not is_bounced(belief, present, slack_tokens):
        return None
    message = (
        f"{queued_tokens} prompt tokens wait here, {belief.queued_prefill_tokens} were believed to; "
        "another worker may take the request"
    )
    return Failure(request.request_id, len(request.emitted_token_ids), FailureCode.BOUNCED, message, present)
