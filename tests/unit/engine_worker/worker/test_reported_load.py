from controlplane.model.instance import LoadReport
from controlplane.model.request import StepOutput, TokenDelta
from engine_worker.reported_load import reported_load
from engine_worker.request_table import RequestTable
from tests.unit.engine_worker.worker.fake_engine import make_request


def table_of(*prompts: int) -> RequestTable:
    table = RequestTable()
    for number, prompt in enumerate(prompts):
        request = make_request(f"r{number}", prompt=prompt, emitted=1)
        table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)
    return table


def test_what_the_engine_counts_is_reported_as_it_is() -> None:
    load = LoadReport(running_requests=2, queued_requests=1, queued_prefill_tokens=7)
    assert reported_load(load, table_of(10, 20, 30)) is load


def test_requests_submitted_since_the_last_step_are_added() -> None:
    load = LoadReport(running_requests=1, queued_requests=0, queued_prefill_tokens=5)
    reported = reported_load(load, table_of(10, 20, 30))
    assert reported.queued_requests == 2
    assert reported.queued_prefill_tokens == 5 + 21 + 31


def test_a_request_that_has_started_is_not_taken_for_a_new_one() -> None:
    table = table_of(10, 20)
    table.route(StepOutput((TokenDelta("r1", 1, (5,)),)))
    assert reported_load(LoadReport(running_requests=1), table) == LoadReport(running_requests=1)
