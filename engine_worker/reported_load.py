"""The load that a worker reports. Pure."""

from msgspec.structs import replace

from controlplane.model.instance import LoadReport
from engine_worker.request_table import RequestTable


def reported_load(engine_load: LoadReport, table: RequestTable) -> LoadReport:
    """The engine's load as of its last step, plus the requests handed to it since.

    Without them the report would name requests as admitted that it does not count, and for one step whoever
    places requests would see the instance emptier than it is. The prompts of such requests count in full: how
    much of them is cached is known only after the step that admits them.
    """
    uncounted = len(table) - engine_load.running_requests - engine_load.queued_requests
    if uncounted <= 0:
        return engine_load
    fresh = [tracked for tracked in table.newest(uncounted) if not tracked.started and tracked.state != "discarded"]
    prefill_tokens = sum(
        len(tracked.request.prompt_token_ids) + len(tracked.request.emitted_token_ids) for tracked in fresh
    )
    return replace(
        engine_load,
        queued_requests=engine_load.queued_requests + len(fresh),
        queued_prefill_tokens=engine_load.queued_prefill_tokens + prefill_tokens,
    )
