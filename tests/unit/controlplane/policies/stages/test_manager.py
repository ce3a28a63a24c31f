"""The manager above the agents: plans and peers that come and go, parameters that change in mid-deal, and bugs."""

from typing import Any

import pytest

from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import BoundaryMoved, StageAgent, StageParameters, ToPeer
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.manager import (
    Heard,
    MoveEnded,
    MoveRequest,
    PeerLost,
    PeersChanged,
    PlanChanged,
    ReschedulerChanged,
    StageChanged,
    StageEvent,
    StageInstruction,
    StageManager,
    StartedOver,
    Tick,
)
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.refinement import Refinement, RefinementParameters, RequestLength
from controlplane.protocols.bid_ask.messages import Accepted, Ask, Award, Begun, Bid, Done, Ready, Starving, Withdrawn
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed
from mesh.errors import IllegalTransition

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)
LAYOUT = StageLayout("m", 3, (("a",), ("b",), ("c",)), (100, 1000))
FROZEN = StageParameters(RefinementParameters(policy=Refinement.FROZEN), rebalance=False)
ROOMY = Capacity(500, 10_000)
REQUEST = RunningRequest("r", 500, 20)


class OfA:
    """The manager of instance a, with everybody alive; its state is checked after every event."""

    def __init__(self, parameters: StageParameters = FROZEN) -> None:
        self.manager = StageManager("a", "a1")
        self.now_ms = 0.0
        self.tell(PeersChanged(frozenset("bc")))
        self.tell(PlanChanged(LAYOUT, MODEL, parameters))

    def tell(self, event: StageEvent) -> tuple[StageInstruction, ...]:
        self.now_ms += 1
        instructions = self.manager.handle(event, self.now_ms)
        self.manager.validate()
        return instructions

    def tick(self) -> list[Any]:
        """What is said to others but reports."""
        told = self.tell(Tick(ROOMY, (REQUEST,)))
        return [each.message for each in told if isinstance(each, ToPeer) and isinstance(each.message, Ask)]

    def heard(self, message: Any) -> tuple[StageInstruction, ...]:
        return self.tell(Heard("b", message, ROOMY))

    def begins_to_move(self) -> tuple[str, MoveRequest]:
        """The request is promised to b, which is ready: the ask id, and the migration that is asked for."""
        (ask,) = self.tick()
        (award,) = self.heard(Bid(ask.ask_id, 0, 0.0))
        assert isinstance(award, ToPeer)
        assert isinstance(award.message, Award)
        self.heard(Accepted(ask.ask_id))
        begun, move = self.heard(Ready(ask.ask_id, 1))
        assert begun == ToPeer("b", Begun(ask.ask_id))
        assert isinstance(move, MoveRequest)
        return ask.ask_id, move


def test_the_plan_is_used_without_the_instances_that_are_not_there() -> None:
    manager = StageManager("b", "b1")
    assert manager.handle(PeersChanged(frozenset("ac")), 0.0) == ()
    assert manager.handle(PlanChanged(LAYOUT, MODEL, FROZEN), 0.0) == (BoundaryMoved(1000), StageChanged(1))
    assert manager.revision == 3
    assert manager.handle(PeersChanged(frozenset("ac")), 1.0) == (), "nothing has changed"
    assert manager.handle(PeersChanged(frozenset("c")), 2.0) == (StageChanged(0),)
    assert manager.handle(PlanChanged(None), 3.0)[-1] == StageChanged(None)
    assert (manager.stage, manager.revision) == (None, 0)
    manager.validate()


def test_without_a_plan_others_are_answered_and_nothing_else_is_said() -> None:
    manager = StageManager("a", "a1")
    assert manager.handle(Tick(ROOMY, (REQUEST,)), 0.0) == ()
    assert manager.handle(PeerLost("b", ROOMY), 0.0) == ()
    (answer,) = manager.handle(Heard("b", Ask("b-1", "q", 10, 10), ROOMY), 1.0)
    assert isinstance(answer, ToPeer)
    assert isinstance(answer.message, Bid)
    assert manager.handle(Tick(ROOMY, (REQUEST,)), 2.0) == ()
    manager.validate()


def test_who_is_overloaded_offers_nothing_within_its_stage_while_the_rescheduler_balances_there() -> None:
    """What has outgrown the stage is handed on all the same."""
    crowded = Capacity(5000, 10_000)
    long, short = RunningRequest("long", 500, 20), RunningRequest("short", 40, 20)
    a = OfA(StageParameters(FROZEN.refinement))
    asked = []
    a.tell(PlanChanged(StageLayout("m", 4, (("a", "b"), ("c",)), (100,)), MODEL, StageParameters(FROZEN.refinement)))
    for is_on in (True, False, True):
        a.tell(ReschedulerChanged(is_on))
        a.tell(ReschedulerChanged(is_on))
        a.heard(StageReport(10, 100.0, ()))
        told = a.tell(Tick(crowded, (long, short)))
        messages = [each.message for each in told if isinstance(each, ToPeer)]
        asked.append({each.request_id for each in messages if isinstance(each, Ask)})
    assert asked == [{"long"}, {"long", "short"}, {"long"}]


def test_a_migration_that_outlives_its_parameters_is_ended_by_who_asked_for_it() -> None:
    a = OfA()
    ask_id, move = a.begins_to_move()
    assert (move.request_id, move.target_instance_id) == ("r", "b")
    a.tell(PlanChanged(LAYOUT, MODEL, StageParameters(FROZEN.refinement, rebalance=False, retry_s=9.0)))
    again_id, second = a.begins_to_move()
    assert again_id != ask_id, "the new agent knows nothing of the deal"
    assert a.tell(MoveEnded(move.order_id, True)) == (ToPeer("b", Done(ask_id, True)), Closed("r", "b", True, ""))
    left = "it is not here any more"
    assert a.tell(MoveEnded(second.order_id, False, left)) == (
        ToPeer("b", Done(again_id, False)),
        Closed("r", "b", False, left),
    )
    with pytest.raises(KeyError):
        a.manager.handle(MoveEnded(move.order_id, True), 9.0)


def test_the_end_of_one_migration_may_begin_the_next_even_of_a_former_agent() -> None:
    a = OfA()
    _, move = a.begins_to_move()
    told = a.tell(Tick(ROOMY, (REQUEST, RunningRequest("s", 400, 20))))
    (ask,) = [each.message for each in told if isinstance(each, ToPeer) and isinstance(each.message, Ask)]
    a.heard(Bid(ask.ask_id, 0, 0.0))
    a.heard(Starving(ask.ask_id, 6))
    a.tell(PlanChanged(LAYOUT, MODEL, StageParameters(FROZEN.refinement, rebalance=False, retry_s=9.0)))
    *_, begun, following = a.tell(MoveEnded(move.order_id, True))
    assert begun == ToPeer("b", Begun(ask.ask_id))
    assert isinstance(following, MoveRequest)
    assert a.tell(MoveEnded(following.order_id, True))[0] == ToPeer("b", Done(ask.ask_id, True))


def test_the_loss_of_a_peer_makes_room_for_the_promises_of_another() -> None:
    a = OfA()
    for number, peer in enumerate(("b", "c", "d", "e")):
        a.tell(Heard(peer, Award(f"{peer}-1", f"r{number}", 10, 10), ROOMY))
    assert a.tell(PeerLost("b", ROOMY)) == (ToPeer("e", Ready("e-1", 1)),), "three slots, four promises"


def test_requests_that_end_while_they_are_on_offer_are_withdrawn() -> None:
    a = OfA()
    told = a.tell(Tick(ROOMY, (REQUEST, RunningRequest("s", 400, 20))))
    asks = [each.message for each in told if isinstance(each, ToPeer) and isinstance(each.message, Ask)]
    for ask in asks:
        a.heard(Bid(ask.ask_id, 0, 0.0))
    assert a.manager.offered == ("r", "s")
    told = a.tell(Tick(ROOMY, (), ("r", "s")))
    assert {ToPeer("b", Withdrawn(ask.ask_id, "the request ended")) for ask in asks} <= set(told)
    assert a.manager.offered == ()


def test_no_two_lives_of_an_instance_ask_under_one_id() -> None:
    asks = []
    for incarnation_id in ("a1", "a2"):
        a = OfA()
        a.manager = StageManager("a", incarnation_id)
        a.tell(PeersChanged(frozenset("bc")))
        a.tell(PlanChanged(LAYOUT, MODEL, FROZEN))
        asks += a.tick()
    assert len({ask.ask_id for ask in asks}) == 2


REFINING = StageParameters(RefinementParameters(interval_s=5.0, smoothing=1.0, fewest_requests=2), rebalance=False)


@pytest.mark.parametrize("why", ["a plan", "a peer is back", "a bug"])
def test_refinement_begins_an_interval_after_the_boundary_is_set(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise IllegalTransition("a deal cannot do that")

    b = StageManager("b", "b1")
    b.handle(PeersChanged(frozenset("a" if why == "a peer is back" else "ac")), 0.0)
    set_ms = 0.0 if why == "a plan" else 4000.0
    b.handle(PlanChanged(LAYOUT, MODEL, REFINING), 0.0)
    if why == "a peer is back":
        assert BoundaryMoved(1000) in b.handle(PeersChanged(frozenset("ac")), set_ms)
    if why == "a bug":
        with monkeypatch.context() as patch:
            patch.setattr(StageAgent, "tick", broken)
            assert BoundaryMoved(1000) in b.handle(Tick(ROOMY, ()), set_ms)
    b.handle(Heard("c", StageReport(0, None, (RequestLength(1, 5),) * 4), ROOMY), set_ms + 4000.0)
    early = b.handle(Tick(ROOMY, ()), set_ms + 4999.0)
    assert not any(isinstance(each, BoundaryMoved) for each in early)
    assert BoundaryMoved(101) in b.handle(Tick(ROOMY, ()), set_ms + 5000.0)


def test_a_bug_in_the_protocol_costs_the_deals_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    a = OfA()
    ask_id, move = a.begins_to_move()

    def broken(*_: Any) -> Any:
        raise IllegalTransition("a deal cannot do that")

    with monkeypatch.context() as patch:
        patch.setattr(StageAgent, "receive", broken)
        told = a.heard(Ready(ask_id, 2))
    assert told[0] == StartedOver("a deal cannot do that")
    assert BoundaryMoved(100) in told, "the fresh agent is at the plan"
    assert a.manager.stage == 0
    assert a.heard(Ready(ask_id, 3)) == (ToPeer("b", Withdrawn(ask_id, "it is not on offer (any more)")),)
    assert Closed("r", "b", False, "it was kept") in a.tell(MoveEnded(move.order_id, False, "it was kept"))
    assert a.tick(), "it goes on"


def test_who_cannot_move_kv_offers_nothing() -> None:
    a = OfA()
    stuck = Capacity(500, 10_000, transfer_obstacle="its transfer agent is gone")
    told = a.tell(Tick(stuck, (REQUEST,)))
    assert not any(isinstance(each, ToPeer) and isinstance(each.message, Ask) for each in told)
