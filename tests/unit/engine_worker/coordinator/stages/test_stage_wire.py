"""Stage messages survive the wire; ended requests are counted once, where they end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.refinement import RequestLength
from controlplane.protocols.bid_ask import messages
from engine_worker.coordinator.stages import wire
from engine_worker.coordinator.stages.ended_lengths import EndedLengths
from engine_worker.request_table import RequestTable
from mesh.errors import ProtocolViolation
from penstock.v1 import stages_pb2
from tests.unit.engine_worker.coordinator.running_workers import make_request

counts = st.integers(0, 2**31)
texts = st.text(max_size=10)
times = st.floats(0, 1e6)
bid_ask = st.one_of(
    st.builds(messages.Ask, texts, texts, counts, counts),
    st.builds(messages.Bid, texts, counts, times),
    st.builds(messages.Pass, texts, texts),
    st.builds(messages.Award, texts, texts, counts, counts),
    st.builds(messages.Accepted, texts),
    st.builds(messages.Refused, texts, texts),
    st.builds(messages.Ready, texts, counts),
    st.builds(messages.Starving, texts, counts),
    st.builds(messages.Begun, texts),
    st.builds(messages.Busy, texts, counts),
    st.builds(messages.Withdrawn, texts, texts),
    st.builds(messages.Done, texts, st.booleans()),
)
lengths = st.lists(st.builds(RequestLength, counts, counts), max_size=5).map(tuple)
reports = st.builds(StageReport, counts, st.none() | times, lengths)


@settings(deadline=None)
@given(bid_ask | reports)
def test_what_is_said_is_heard(message: messages.Message | StageReport) -> None:
    sent = wire.stage_message(message).SerializeToString()
    assert wire.to_message(stages_pb2.StageMessage.FromString(sent)) == message


@pytest.mark.parametrize(
    "message",
    [
        stages_pb2.StageMessage(),
        wire.hello("a", "1", "2"),
        stages_pb2.StageMessage(report=stages_pb2.StageReport(input_tokens=[1])),
    ],
)
def test_what_makes_no_sense_is_a_violation(message: stages_pb2.StageMessage) -> None:
    with pytest.raises(ProtocolViolation):
        wire.to_message(message)


def admit(table: RequestTable, request_id: str, emitted: int) -> None:
    table.admit(make_request(request_id, prompt=10), stream_id=1, frontend_id="f", now_s=0.0, deadline_s=None)
    tracked = table.find(request_id)
    assert tracked is not None
    tracked.emitted_token_ids.extend(range(emitted))


def test_ended_requests_are_remembered_where_they_end() -> None:
    table, ended = RequestTable(), EndedLengths()
    for request_id, emitted in (("ends", 5), ("moves", 7), ("fails", 0), ("stays", 9)):
        admit(table, request_id, emitted)
    ended.look(table, 0.0)
    ended.moved_away("moves")
    for request_id in ("ends", "moves", "fails"):
        table.take_out(request_id)
    ended.look(table, 1.0)
    assert list(ended.lengths) == [(10, 5)]
    assert ended.ended_total == 1
    assert ended.in_flight == 1
    admit(table, "another", 1)
    ended.look(table, 2.0)
    assert 1 < ended.in_flight < 2
