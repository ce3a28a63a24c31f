"""Requests that outlive their frontend, and whom they belong to then."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.request import EngineRequest, FinishReason, Resume, SamplingParams, StepOutput, TokenDelta
from controlplane.protocols.ownership import EPOCHS_PER_ADOPTION
from engine_worker.deltas import Failure, FailureCode
from engine_worker.finished_tails import MAX_KEPT, MAX_KEPT_TOKENS, FinishedTail, FinishedTails
from engine_worker.request_table import NO_STREAM, Instructions, RequestTable

ORPHAN_S = 10.0


def request(request_id: str, client: str | None) -> EngineRequest:
    resume = None if client is None else Resume(client, b"ticket")
    return EngineRequest(request_id, (1, 2, 3), SamplingParams(max_tokens=1000), resume=resume)


def table_with(*requests: EngineRequest, max_orphans: int = 10) -> RequestTable:
    """All of stream 1, of frontend-0."""
    table = RequestTable(max_orphans)
    for each in requests:
        table.admit(each, stream_id=1, frontend_id="frontend-0", now_s=0.0)
    return table


def step(table: RequestTable, request_id: str, *tokens: int, finish: FinishReason | None = None) -> Instructions:
    tracked = table.find(request_id)
    assert tracked is not None
    delta = TokenDelta(request_id, len(tracked.emitted_token_ids), tokens, finish_reason=finish)
    return table.route(StepOutput((delta,)))


def test_only_what_can_be_resumed_outlives_its_stream_and_only_for_so_long() -> None:
    table = table_with(request("a", "a"), request("b", None))
    assert table.close_stream(1, ORPHAN_S).aborts == ["b"]
    assert step(table, "a", 7).messages == {}, "nobody hears of it"
    assert table.expire(ORPHAN_S - 0.1).aborts == []
    assert table.expire(ORPHAN_S).aborts == ["a"]
    assert table.adopt("a", 2, "frontend-1")[0] == []


def test_who_adopts_gets_all_tokens_and_what_follows_them() -> None:
    table = table_with(request("a", "a"), request("a-1", "a"), request("c", "c"))
    step(table, "a", 7, 8)
    table.close_stream(1, ORPHAN_S)
    step(table, "a", 9)
    adoptions, _ = table.adopt("a", 2, "frontend-1")
    assert {each.request.request_id: each.request.emitted_token_ids for each in adoptions} == {
        "a": (7, 8, 9),
        "a-1": (),
    }
    assert all(each.epoch == EPOCHS_PER_ADOPTION for each in adoptions)
    instructions = step(table, "a", 10)
    assert (list(instructions.messages), instructions.epochs) == ([2], {"a": EPOCHS_PER_ADOPTION})
    assert table.expire(ORPHAN_S).aborts == ["c"]


def test_a_frontend_that_still_has_the_request_is_told_that_it_has_gone() -> None:
    table = table_with(request("a", "a"))
    step(table, "a", 7)
    _, instructions = table.adopt("a", 2, "frontend-1")
    ((failure,),) = (instructions.messages[1],)
    assert isinstance(failure, Failure)
    assert (failure.code, failure.offset) == (FailureCode.ADOPTED, 1)
    assert table.abort(1, "a", EPOCHS_PER_ADOPTION).aborts == [], "it is not its own any more"
    assert table.close_stream(1, ORPHAN_S).aborts == []
    assert table.abort(2, "a", EPOCHS_PER_ADOPTION).aborts == ["a"]


def test_a_release_that_crosses_the_clients_return_leaves_the_next_life_alone() -> None:
    """Found by seed 8038: the frontend refused the first token of a request that had moved, while it asked for it."""
    table = table_with(request("a", "a"))
    table.adopt("a", 1, "frontend-0")
    table.release(1, "a", 0, ORPHAN_S)
    assert table.orphans == []
    table.release(1, "a", EPOCHS_PER_ADOPTION, ORPHAN_S)
    assert len(table.orphans) == 1


def test_what_has_just_ended_is_there_and_what_was_aborted_is_not() -> None:
    table = table_with(request("a", "a"), request("b", "b"), request("c", "c"))
    step(table, "a", 7, finish=FinishReason.LENGTH)
    step(table, "b", 8)
    table.abort(1, "b", 0, is_done=True)
    table.abort(1, "c", 0)
    ended, done = (table.adopt(client, 2, "frontend-1")[0][0] for client in "ab")
    assert (ended.request.emitted_token_ids, ended.finish_reason, ended.is_ended) == ((7,), FinishReason.LENGTH, True)
    assert (done.request.emitted_token_ids, done.finish_reason, done.is_ended) == ((8,), None, True)
    assert table.adopt("c", 2, "frontend-1")[0] == []
    table.tails.turn()
    assert len(table.tails) == 2
    table.tails.turn()
    assert len(table.tails) == 0


def test_a_frontend_that_had_only_lost_its_connection_gives_its_orphans_up() -> None:
    table = table_with(request("a", "a"))
    table.close_stream(1, ORPHAN_S)
    assert table.drop_orphans("frontend-1").aborts == []
    assert table.drop_orphans("frontend-0").aborts == ["a"]


@given(st.integers(0, 5), st.integers(0, 8), st.integers(0, 8))
def test_orphans_are_bounded(max_orphans: int, closed: int, released: int) -> None:
    ids = [f"r{number}" for number in range(closed + released)]
    table = table_with(*(request(each, each) for each in ids), max_orphans=max_orphans)
    aborts = []
    for request_id in ids[:released]:
        aborts += table.release(1, request_id, 0, ORPHAN_S).aborts
    aborts += table.close_stream(1, ORPHAN_S).aborts
    assert len(table.orphans) == min(max_orphans, len(ids))
    assert len(aborts) == len(ids) - len(table.orphans)
    assert all(tracked.stream_id == NO_STREAM for tracked in table.orphans)


@given(st.lists(st.integers(0, 400_000), max_size=40))
def test_tails_are_bounded_by_tokens(sizes: list[int]) -> None:
    tails = FinishedTails()
    for number, size in enumerate(sizes):
        prompt = (1,) * size
        tails.keep(FinishedTail(EngineRequest(f"r{number}", prompt, SamplingParams(9)), None, None, 0))
    kept = [tail for number in range(len(sizes)) if (tail := tails._tails.get(f"r{number}")) is not None]
    assert sum(tail.tokens for tail in kept) <= MAX_KEPT_TOKENS
    assert not sizes or kept[-1].request.request_id == f"r{len(sizes) - 1}", "the oldest go first"


def test_tails_are_bounded_by_number() -> None:
    tails = FinishedTails()
    for number in range(MAX_KEPT + 5):
        tails.keep(FinishedTail(request(f"r{number}", "c"), None, None, 0))
    assert len(tails) == len(tails.of("c")) == MAX_KEPT


def test_a_request_between_two_instances_is_adopted_once_it_has_arrived() -> None:
    table = table_with(request("a", "a"))
    table.close_stream(1, ORPHAN_S)
    assert table.adopt("a", 2, "frontend-1", lambda request_id: request_id != "a")[0] == []
    assert len(table.orphans) == 1
    assert len(table.adopt("a", 2, "frontend-1")[0]) == 1
