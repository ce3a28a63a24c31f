"""What a worker tells of its decoding requests."""

import pytest

from controlplane.decode_message import decode_load_of, decode_message
from controlplane.model.request import EngineRequest, SamplingParams, StepOutput, TokenDelta
from controlplane.model.running_request import RunningRequest
from controlplane.policies.rescheduling.record import ReschedulerRecord
from engine_worker.decode_reporting import DecodeReporting, running_requests
from engine_worker.request_table import RequestTable
from mesh.errors import ConfigurationError, ProtocolViolation
from penstock.v1 import monitor_pb2


def table_of(*request_ids: str) -> RequestTable:
    table = RequestTable()
    for request_id in request_ids:
        request = EngineRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=9))
        table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)
    return table


def emit(table: RequestTable, request_id: str, offset: int, *tokens: int) -> None:
    table.route(StepOutput((TokenDelta(request_id, offset, tokens),)))


def test_requests_count_from_their_first_token_on() -> None:
    table = table_of("waiting", "decoding", "aborted")
    emit(table, "decoding", 0, 7)
    emit(table, "aborted", 0, 7)
    table.abort(1, "aborted", 0)
    assert running_requests(table) == [RunningRequest("decoding", 4, 1, frontend_id="f")]
    taken_over = EngineRequest("moved", (1,), SamplingParams(max_tokens=9), emitted_token_ids=(5, 6))
    table.admit(taken_over, stream_id=1, frontend_id="f", now_s=0.0, taken_over=True)
    assert running_requests(table)[1] == RunningRequest("moved", 3, 2, frontend_id="f")


def test_a_prediction_counts_down_with_every_token() -> None:
    table = table_of("r")
    emit(table, "r", 0, 7, 8)
    table.predicted("r", generated_tokens=1, remaining_tokens=3)
    table.predicted("gone", generated_tokens=1, remaining_tokens=3)
    assert running_requests(table) == [RunningRequest("r", 5, 2, 2, frontend_id="f")]
    emit(table, "r", 2, 9, 9, 9)
    assert running_requests(table)[0].remaining_tokens == 0, "it outlived its prediction"


def test_a_range_counts_down_too_and_is_forgotten_with_its_prediction() -> None:
    table = table_of("r", "s")
    emit(table, "r", 0, 7, 8)
    emit(table, "s", 0, 7)
    table.predicted("r", generated_tokens=1, remaining_tokens=3, band_tokens=(1, 8))
    table.predicted("s", generated_tokens=1, remaining_tokens=5)
    assert [each.band_tokens for each in running_requests(table)] == [(0, 7), None]
    load = DecodeReporting(table).load()
    assert load.band_tokens is not None
    assert load.band_tokens.tolist() == [[0, 5], [7, 5]], "who has no range is as long as predicted"
    table.predicted("r", generated_tokens=2, remaining_tokens=3)
    assert DecodeReporting(table).load().band_tokens is None


def test_the_mesh_says_how_often_and_how_far_ahead() -> None:
    table = table_of("r")
    emit(table, "r", 0, 7)
    reporting = DecodeReporting(table)
    assert reporting.interval_s is None, "nobody asks"
    reporting.configure(ReschedulerRecord("predicted", {"interval_s": 0.5, "horizon_steps": 2, "stride_tokens": 10}), 1)
    assert reporting.interval_s == 0.5
    assert reporting.load().future_tokens.tolist() == [4, 14, 24]
    reporting.configure(ReschedulerRecord("off"), 2)
    assert reporting.interval_s is None
    with pytest.raises(ConfigurationError, match="no rescheduler mode"):
        reporting.configure(ReschedulerRecord("best"), 3)


@pytest.mark.parametrize("band", [None, (7, 900)])
def test_a_report_means_the_same_at_the_other_end(band: tuple[int, int] | None) -> None:
    table = table_of("r", "s")
    emit(table, "r", 0, 7)
    emit(table, "s", 0, 7)
    table.predicted("s", generated_tokens=1, remaining_tokens=300, band_tokens=band)
    sent = DecodeReporting(table).load()
    message = monitor_pb2.DecodeReport.FromString(decode_message(sent).SerializeToString())
    heard = decode_load_of(message)
    assert heard.request_ids == ("r", "s")
    assert heard.horizon == sent.horizon
    for name in ("context_tokens", "remaining_tokens", "future_tokens"):
        assert getattr(heard, name).tolist() == getattr(sent, name).tolist()
    if band is None:
        assert heard.band_tokens is None
    else:
        assert heard.band_tokens is not None
        assert heard.band_tokens.tolist() == [[-1, 7], [-1, 900]]
        message.low_tokens.append(1)
        with pytest.raises(ProtocolViolation):
            decode_load_of(message)
        del message.low_tokens[-1]
    message.context_tokens.append(1)
    with pytest.raises(ProtocolViolation, match="2 requests has 3 contexts"):
        decode_load_of(message)
