"""The story of one request."""

from penstock.v1 import frontend_pb2, scheduler_pb2
from services.frontend.console.requests import spans, story
from services.frontend.console.state import MoveRow
from tests.unit.services.frontend.console.looks import START_UNIX_MS, ended

MOVE = MoveRow("r1", "w0000", "w0001", "even", START_UNIX_MS - 400, "moved", "", 3.0, 20.0)


def test_a_waterfall_of_an_answered_request() -> None:
    found = spans(ended(1), [MOVE])
    assert [(span.name, span.start_ms, span.end_ms) for span in found] == [
        ("admission", 0.0, 1.0),
        ("placement", 1.0, 5.0),
        ("prefill", 5.0, 100.0),
        ("decode", 100.0, 200.0),
        ("move", 100.0, 120.0),
    ]
    assert not any(span.is_bad for span in found)
    assert "60 of 100 prompt tokens" in found[2].detail


def test_a_request_that_was_never_placed_ends_with_its_placement() -> None:
    request = ended(1, status=503)
    for field in ("placed_ms", "first_token_ms"):
        request.ClearField(field)
    found = spans(request, ())
    assert [(span.name, span.end_ms, span.is_bad) for span in found] == [
        ("admission", 1.0, False),
        ("placement", 200.0, True),
    ]


def test_tiers_of_a_cascade_follow_each_other() -> None:
    request = ended(1, tier="large", ended_ms=2000.0)
    request.tiers.add(model="small", score=20.0, seconds=0.3)
    request.tiers.add(model="large", seconds=1.0)
    found = spans(request, ())
    assert [(span.name, span.start_ms, span.end_ms) for span in found[1:]] == [
        ("tier small", 1.0, 301.0),
        ("tier large", 301.0, 1301.0),
    ]


def test_nobody_knows_it() -> None:
    assert story("x", {}, {}, {}, [], [], 0) is None


def test_one_that_runs_and_one_that_only_a_scheduler_remembers() -> None:
    running = frontend_pb2.FrontendRequest(request_id="r1", model="m", age_ms=300, generated_tokens=4)
    told = story("r1", {}, {"frontend-0": running}, {}, [], [], START_UNIX_MS)
    assert told is not None
    assert (told.status, told.total_ms, told.arrived_unix_ms) == (0, 300.0, START_UNIX_MS - 300)
    explained = scheduler_pb2.ExplainResponse(request_id="r1", chosen_instance_id="w0000", placed_unix_ms=7)
    told = story("r1", {}, {}, {"a": explained}, [], ["b is away"], START_UNIX_MS)
    assert told is not None
    assert told.placement is not None
    assert told.placement.scheduler == "a"
    assert told.missing[0] == "b is away"
    assert "no frontend remembers" in told.missing[1]


def test_the_frontend_where_it_ended_last_tells() -> None:
    first, second = ended(1, status=499), ended(1, ended_ms=900.0)
    told = story("r1", {"a": first, "b": second}, {}, {}, [MOVE], [], START_UNIX_MS)
    assert told is not None
    assert (told.frontend, told.status, told.moves) == ("b", 200, (MOVE,))
