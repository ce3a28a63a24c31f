"""Whatever engine, frontends and clock do: no delta is lost, doubled or sent to the wrong stream."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.model.request import FinishReason, StepOutput, Tenant, TokenDelta
from engine_worker.deltas import Failure, FailureCode
from engine_worker.request_table import Instructions, RequestTable
from mesh.errors import IllegalTransition
from tests.examples import examples
from tests.unit.engine_worker.worker.fake_engine import make_request


def test_tenants_take_turns_by_what_is_computed_for_them() -> None:
    table = RequestTable()

    def submit(request_id: str, tenant: str, tokens: int = 4096) -> int:
        request = replace(make_request(request_id, prompt=tokens), tenant=Tenant(tenant))
        turned = table.with_turn(request)
        table.admit(turned, stream_id=1, frontend_id="f", now_s=0.0)
        return turned.turn

    def begin(request_id: str, cached_tokens: int, *, ends: bool = False) -> None:
        reason = FinishReason.LENGTH if ends else None
        table.route(StepOutput((TokenDelta(request_id, 0, (5,), cached_tokens=cached_tokens, finish_reason=reason),)))

    greedy = [submit(f"greedy-{number}", "greedy") for number in range(12)]
    assert greedy == sorted(greedy)
    assert greedy[-1] > greedy[0]
    assert submit("modest", "modest") == greedy[0], "before all that others have waiting"
    begin("greedy-9", cached_tokens=0)
    assert submit("later", "third") == greedy[9], "not before what is served already"
    before = submit("greedy-12", "greedy")
    begin("greedy-10", cached_tokens=4096)
    assert submit("greedy-13", "greedy") < before + (before - greedy[-1]), "cached tokens are given back"
    for request_id in ("greedy-11", "modest"):
        begin(request_id, 0, ends=True)
    table.validate()
    moved = replace(make_request("moved", prompt=4096), tenant=Tenant("third"))
    table.admit(moved, stream_id=1, frontend_id="f", now_s=0.0, taken_over=True)
    before = table.shares.enter("before", Tenant("third"), 0)
    begin("moved", cached_tokens=100_000)
    assert table.shares.enter("after", Tenant("third"), 0) >= before, "KV that came with a request earns nothing"
    for name in ("before", "after"):
        table.shares.leave(name)
    refused = table.with_turn(make_request("refused", prompt=8))
    table.take_out(refused.request_id)
    for tracked in list(table):
        table.take_out(tracked.request.request_id)
    assert len(table.shares) == 0
    table.validate()


IDS = [f"request-{number}" for number in range(6)]
STREAMS = [1, 2, 3]


class Client:
    """What one stream has heard of one request."""

    def __init__(self, emitted: int) -> None:
        self.first = emitted
        self.next = emitted
        self.ended = False


class TableMachine(RuleBasedStateMachine):
    """The table between a model of the engine and a model of the frontends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable()
        self.engine: dict[str, int] = {}
        self.engine_aborts: set[str] = set()
        self.clients: dict[tuple[int, str], Client] = {}
        self.open_streams = set(STREAMS)
        self.now_s = 0.0

    def obey(self, instructions: Instructions) -> None:
        for request_id in instructions.aborts:
            assert request_id in self.engine, "an abort for what the engine does not have"
            assert request_id not in self.engine_aborts, "the engine is told twice"
            self.engine_aborts.add(request_id)
        for stream_id, deltas in instructions.messages.items():
            assert stream_id in self.open_streams, "a message to a stream that has ended"
            assert deltas
            for delta in deltas:
                self.hear(stream_id, delta)

    def hear(self, stream_id: int, delta: TokenDelta | Failure) -> None:
        client = self.clients[stream_id, delta.request_id]
        assert not client.ended, "news of a request after its end"
        assert delta.offset == client.next
        if isinstance(delta, Failure):
            client.ended = True
        else:
            client.next += len(delta.token_ids)
            client.ended = delta.finish_reason is not None

    @rule(
        request_id=st.sampled_from(IDS),
        stream_id=st.sampled_from(STREAMS),
        emitted=st.integers(0, 3),
        deadline_s=st.none() | st.floats(0.0, 10.0),
    )
    def generate(self, request_id: str, stream_id: int, emitted: int, deadline_s: float | None) -> None:
        if stream_id not in self.open_streams:
            return
        instructions = self.table.refuse_duplicate(stream_id, request_id)
        if instructions is not None:
            assert request_id in self.engine
            mine = self.clients.get((stream_id, request_id))
            if mine is None or mine.ended:
                self.clients[stream_id, request_id] = Client(0)
            self.obey(instructions)
            assert self.clients[stream_id, request_id].ended, "a refusal is an end"
            return
        self.engine[request_id] = emitted
        self.clients[stream_id, request_id] = Client(emitted)
        self.table.admit(
            make_request(request_id, emitted=emitted),
            stream_id=stream_id,
            frontend_id=f"frontend-{stream_id}",
            now_s=self.now_s,
            deadline_s=None if deadline_s is None else self.now_s + deadline_s,
        )

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        deltas = []
        for request_id in data.draw(st.lists(st.sampled_from(IDS), unique=True)):
            if request_id not in self.engine:
                continue
            offset = self.engine[request_id]
            count = data.draw(st.integers(0, 3))
            reason = data.draw(st.sampled_from([None, None, FinishReason.STOP, FinishReason.ERROR]))
            if request_id in self.engine_aborts and data.draw(st.booleans()):
                reason = FinishReason.ABORT
            deltas.append(TokenDelta(request_id, offset, tuple(range(count)), finish_reason=reason))
            self.engine[request_id] += count
            if reason is not None:
                del self.engine[request_id]
                self.engine_aborts.discard(request_id)
        before = {key: (client.next, client.ended) for key, client in self.clients.items()}
        live = {(tracked.stream_id, tracked.request.request_id) for tracked in self.table.live()}
        self.obey(self.table.route(StepOutput(tuple(deltas))))
        for delta in deltas:
            for key in live:
                if key[1] == delta.request_id:
                    heard = self.clients[key].next - before[key][0]
                    assert heard == len(delta.token_ids), "a delta was lost or doubled"
                    assert self.clients[key].ended == (delta.finish_reason is not None)

    @rule(request_id=st.sampled_from(IDS), offset=st.integers(0, 20))
    def broken_step(self, request_id: str, offset: int) -> None:
        """The engine skips or repeats tokens: the request ends and says so."""
        if request_id not in self.engine or self.engine[request_id] == offset:
            return
        tracked = self.table.find(request_id)
        assert tracked is not None
        live, stream_id = tracked.state != "discarded", tracked.stream_id
        self.obey(self.table.route(StepOutput((TokenDelta(request_id, offset, (1,)),))))
        if live:
            assert self.clients[stream_id, request_id].ended

    @rule(request_id=st.sampled_from(IDS), stream_id=st.sampled_from(STREAMS))
    def abort(self, request_id: str, stream_id: int) -> None:
        self.obey(self.table.abort(stream_id, request_id, 0))

    @rule(stream_id=st.sampled_from(STREAMS))
    def stream_ends(self, stream_id: int) -> None:
        self.open_streams.discard(stream_id)
        self.obey(self.table.close_stream(stream_id))
        assert self.table.live(stream_id) == []
        for key in [key for key in self.clients if key[0] == stream_id]:
            del self.clients[key]

    @rule(stream_id=st.sampled_from(STREAMS))
    def stream_comes_back(self, stream_id: int) -> None:
        self.open_streams.add(stream_id)

    @rule(passed_s=st.floats(0.0, 5.0))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.obey(self.table.expire(self.now_s))
        assert all(t.deadline_s is None or t.deadline_s > self.now_s for t in self.table.live())

    @rule()
    def everything_fails(self) -> None:
        self.obey(self.table.fail_all(FailureCode.UNAVAILABLE, "draining"))
        assert self.table.live() == []

    @invariant()
    def table_and_engine_agree(self) -> None:
        self.table.validate()
        assert {tracked.request.request_id for tracked in self.table} == set(self.engine)
        for tracked in self.table:
            request_id = tracked.request.request_id
            assert (request_id in self.engine_aborts) == (tracked.state != "running")
            if tracked.state != "discarded":
                assert len(tracked.emitted_token_ids) == self.engine[request_id]

    @invariant()
    def every_open_request_is_live(self) -> None:
        live = {(tracked.stream_id, tracked.request.request_id) for tracked in self.table.live()}
        assert live == {key for key, client in self.clients.items() if not client.ended}


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def admitted(*request_ids: str, stream_id: int = 1) -> RequestTable:
    table = RequestTable()
    for request_id in request_ids:
        table.admit(make_request(request_id), stream_id=stream_id, frontend_id="f", now_s=0.0)
    return table


def test_the_table_knows_what_another_worker_would_need() -> None:
    table = RequestTable()
    request = make_request("a", emitted=2)
    table.admit(request, stream_id=1, frontend_id="f", now_s=0.0)
    table.route(StepOutput((TokenDelta("a", 2, (7, 8)),)))
    tracked = table.find("a")
    assert tracked is not None
    assert tracked.request.prompt_token_ids == request.prompt_token_ids
    assert tracked.request.sampling == request.sampling
    assert tracked.emitted_token_ids == [100, 101, 7, 8]


def test_a_stray_delta_is_counted_and_reaches_nobody() -> None:
    table = admitted("a")
    assert table.route(StepOutput((TokenDelta("b", 0, (1,)),))).messages == {}
    assert table.strays_total == 1


def test_an_abort_from_another_stream_is_ignored() -> None:
    table = admitted("a")
    assert table.abort(2, "a", 0).aborts == []
    assert table.abort(1, "a", -1).aborts == [], "it was meant for a former life"
    assert table.abort(1, "a", 0).aborts == ["a"]
    assert table.abort(1, "a", 0).aborts == []


def test_a_duplicate_on_the_same_stream_ends_both() -> None:
    table = admitted("a")
    instructions = table.refuse_duplicate(1, "a")
    assert instructions is not None
    (failure,) = instructions.messages[1]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.REFUSED
    assert instructions.aborts == ["a"]


def test_a_duplicate_on_another_stream_leaves_the_first_alone() -> None:
    table = admitted("a")
    instructions = table.refuse_duplicate(2, "a")
    assert instructions is not None
    assert list(instructions.messages) == [2]
    assert instructions.aborts == []
    assert table.route(StepOutput((TokenDelta("a", 0, (1,)),))).messages[1]


def test_an_id_that_is_being_dropped_may_come_again_later() -> None:
    table = admitted("a")
    table.close_stream(1)
    instructions = table.refuse_duplicate(2, "a")
    assert instructions is not None
    (failure,) = instructions.messages[2]
    assert isinstance(failure, Failure)
    assert failure.code is FailureCode.UNAVAILABLE
    table.route(StepOutput((TokenDelta("a", 0, (), finish_reason=FinishReason.ABORT),)))
    assert table.refuse_duplicate(2, "a") is None


def test_every_answer_bears_the_epoch_that_the_request_came_with() -> None:
    table = RequestTable()
    table.admit(make_request("a"), stream_id=1, frontend_id="f", now_s=0.0, epoch=4)
    table.admit(make_request("b"), stream_id=1, frontend_id="f", now_s=0.0)
    assert table.route(StepOutput((TokenDelta("a", 0, (1,)), TokenDelta("b", 0, (1,))))).epochs == {"a": 4}
    assert table.fail_all(FailureCode.UNAVAILABLE, "stopping").epochs == {"a": 4}


def test_a_recovered_request_that_comes_back_while_its_first_life_is_aborted_may_go_elsewhere() -> None:
    table = admitted("a")
    table.abort(1, "a", 0)
    instructions = table.refuse_duplicate(1, "a", epoch=2)
    assert instructions is not None
    (failure,) = instructions.messages[1]
    assert isinstance(failure, Failure)
    assert (failure.code, instructions.epochs) == (FailureCode.UNAVAILABLE, {"a": 2})


def test_a_former_life_that_comes_late_is_not_answered() -> None:
    """The request has moved to here meanwhile, and its frontend hears of that life."""
    table = RequestTable()
    table.admit(make_request("a"), stream_id=1, frontend_id="f", now_s=0.0, epoch=7)
    for stream_id, messages in ((1, 0), (2, 1)):
        instructions = table.refuse_duplicate(stream_id, "a", epoch=6)
        assert instructions is not None
        assert len(instructions.messages) == messages, "another stream is another frontend's, which is told"
        assert instructions.aborts == []
    assert [tracked.epoch for tracked in table.live()] == [7]


@pytest.mark.parametrize("stream_id", [1, 2])
def test_a_recovered_request_that_meets_its_former_life_drops_it_and_may_go_elsewhere(stream_id: int) -> None:
    table = RequestTable()
    request = make_request("a", emitted=2)
    table.admit(request, stream_id=1, frontend_id="f", now_s=0.0, epoch=1, taken_over=True)
    instructions = table.refuse_duplicate(stream_id, "a", epoch=2)
    assert instructions is not None
    ((told, (failure,)),) = instructions.messages.items()
    assert isinstance(failure, Failure)
    assert (told, failure.code, instructions.epochs) == (stream_id, FailureCode.UNAVAILABLE, {"a": 2})
    assert instructions.aborts == ["a"]
    assert table.live() == []
    assert table.route(StepOutput((TokenDelta("a", 2, (3,)),))).messages == {}, "nobody wants its tokens"


def test_admitting_twice_is_a_bug_and_says_so() -> None:
    table = admitted("a")
    with pytest.raises(IllegalTransition, match="request a is admitted twice"):
        table.admit(make_request("a"), stream_id=1, frontend_id="f", now_s=0.0)


def test_admissions_are_remembered_past_the_end_of_their_requests() -> None:
    table = admitted("a", "b")
    assert table.admitted_since(0) == ["a", "b"]
    table.route(StepOutput((TokenDelta("a", 0, (1,), finish_reason=FinishReason.STOP),)))
    position = table.admissions_total
    table.admit(make_request("c"), stream_id=1, frontend_id="f", now_s=0.0)
    assert table.admitted_since(0) == ["a", "b", "c"]
    assert table.admitted_since(position) == ["c"]
    assert table.admitted_since(table.admissions_total) == []


def test_ends_are_remembered_in_their_order_whatever_ended_the_requests() -> None:
    table = admitted("a", "b", "c")
    table.take_out("b")
    position = table.ends_total
    table.route(StepOutput((TokenDelta("a", 0, (1,), finish_reason=FinishReason.STOP),)))
    table.take_out("never here")
    table.abort(1, "c", 0)
    assert table.ended_since(0) == ["b", "a"], "what is being aborted is in the engine still"
    table.route(StepOutput((TokenDelta("c", 0, (), finish_reason=FinishReason.ABORT),)))
    assert table.ended_since(position) == ["a", "c"]
    assert table.ended_since(table.ends_total) == []
