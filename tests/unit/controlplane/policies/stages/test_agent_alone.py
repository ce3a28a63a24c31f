"""One agent whose neighbours answer late or not at all: what it says when, to the millisecond and the token."""

from math import inf
from typing import Any

import pytest

from controlplane.model.running_request import RunningRequest
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import (
    AgentInstruction,
    BoundaryMoved,
    RoutingMode,
    StageAgent,
    StageParameters,
    ToPeer,
)
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.neighbours import StageReport
from controlplane.policies.stages.refinement import Refinement, RefinementParameters, RequestLength
from controlplane.protocols.bid_ask.limits import BidAskLimits
from controlplane.protocols.bid_ask.messages import Accepted, Ask, Award, Begun, Bid, Busy, Done, Ready
from controlplane.protocols.bid_ask.receiver import Capacity
from controlplane.protocols.bid_ask.sender import Closed

MODEL = QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4)
FROZEN = RefinementParameters(policy=Refinement.FROZEN)
EAGER = RefinementParameters(interval_s=5.0, smoothing=1.0, fewest_requests=2)
PAIRS = StageLayout("m", 1, (("a", "b"), ("c", "d")), (1000,))
LINE = StageLayout("m", 1, (("a",), ("b",), ("c",), ("d",), ("e",)), (100, 200, 300, 400))
ROOMY = Capacity(0, 100_000)
LIMITS = BidAskLimits()


def agent(
    layout: StageLayout, instance_id: str = "a", *, limits: BidAskLimits = LIMITS, **parameters: Any
) -> StageAgent:
    made = StageAgent(instance_id, f"{instance_id}0", StageParameters(**{"refinement": FROZEN, **parameters}), limits)
    made.use_layout(layout, MODEL, 0.0)
    return made


def running(*contexts: int) -> tuple[RunningRequest, ...]:
    """Of each the id is its length."""
    return tuple(RunningRequest(str(context), context, context // 4) for context in contexts)


def tick(of: StageAgent, now_ms: float, *contexts: int) -> tuple[AgentInstruction, ...]:
    told = of.tick(Capacity(sum(contexts), 100_000), running(*contexts), now_ms)
    of.validate()
    return told


def asks(told: tuple[AgentInstruction, ...]) -> list[tuple[str, str]]:
    """(request, whom) of each question."""
    messages = [(each.message, each.instance_id) for each in told if isinstance(each, ToPeer)]
    return [(message.request_id, peer) for message, peer in messages if isinstance(message, Ask)]


def reports(told: tuple[AgentInstruction, ...]) -> dict[str, StageReport]:
    return {
        each.instance_id: each.message
        for each in told
        if isinstance(each, ToPeer) and isinstance(each.message, StageReport)
    }


def moved(told: tuple[AgentInstruction, ...]) -> list[float]:
    return [each.boundary_tokens for each in told if isinstance(each, BoundaryMoved)]


def heard(of: StageAgent, peer: str, now_ms: float, load: int = 0, end: float | None = None, *lengths: int) -> None:
    report = StageReport(load, end, tuple(RequestLength(length // 2, length) for length in lengths))
    assert of.receive(peer, report, ROOMY, now_ms) == ()


# -- reports


def test_reports_go_to_the_own_stage_and_both_neighbouring_ones_at_intervals() -> None:
    middle = agent(LINE, "c", report_interval_s=0.4)
    assert reports(tick(middle, 0.0, 40, 8)) == dict.fromkeys(
        "bd", StageReport(48, 300, (RequestLength(30, 40), RequestLength(6, 8)))
    )
    assert reports(tick(middle, 399.0)) == {}
    assert set(reports(tick(middle, 400.0))) == {"b", "d"}
    assert set(reports(tick(agent(PAIRS), 0.0))) == {"b", "c", "d"}
    assert reports(tick(agent(LINE, "e"), 0.0))["d"].boundary_tokens is None


# -- boundaries


def test_the_first_plan_is_told_however_short_its_range() -> None:
    fresh = StageAgent("a", "a0", StageParameters(), LIMITS)
    assert fresh.use_layout(StageLayout("m", 1, (("a",), ("b",)), (1,)), MODEL, 0.0) == (BoundaryMoved(1),)


def test_refinements_keep_their_interval() -> None:
    first = agent(PAIRS, refinement=EAGER)
    first.use_layout(StageLayout("m", 2, PAIRS.stages, (700,)), MODEL, 10_000.0)
    heard(first, "c", 14_000.0, 0, None, 5, 5)
    assert moved(tick(first, 14_999.0)) == []
    assert moved(tick(first, 15_000.0)) == [5]
    heard(first, "c", 19_000.0, 0, None, 9, 9)
    assert moved(tick(first, 19_999.0)) == []
    assert moved(tick(first, 20_000.0)) == [9]
    heard(first, "c", 25_000.0, 0, None, 9, 9)
    assert moved(tick(first, 25_000.0)) == [], "it is where it was"


def test_without_a_quality_model_a_boundary_stays() -> None:
    blind = agent(PAIRS, refinement=EAGER)
    blind.use_layout(PAIRS, None, 0.0)
    heard(blind, "c", 5000.0, 0, None, 5, 5)
    assert moved(tick(blind, 5000.0)) == []


def test_the_first_boundary_may_fall_to_one_token() -> None:
    first = agent(LINE, refinement=EAGER)
    heard(first, "b", 5000.0, 0, 200, 1, 1)
    assert moved(tick(first, 5000.0)) == [1]


@pytest.mark.parametrize(("said", "highest"), [(None, 199), (150.0, 149)])
def test_a_boundary_stays_below_what_the_next_stage_says_or_else_the_plan(said: float | None, highest: float) -> None:
    first = agent(LINE, refinement=EAGER)
    heard(first, "b", 5000.0, 0, said, 900, 900)
    assert moved(tick(first, 5000.0)) == [highest]


def test_the_end_of_a_stage_is_the_mean_of_what_its_instances_say() -> None:
    layout = StageLayout("m", 1, (("a", "b"), ("c",), ("d",)), (100, 1000))
    second = agent(layout, "c", refinement=EAGER)
    heard(second, "a", 5000.0, 0, 80)
    heard(second, "b", 5000.0, 0, 90)
    heard(second, "d", 5000.0, 0, None, 5, 5)
    assert moved(tick(second, 5000.0)) == [86]


def test_what_a_lost_neighbour_had_said_does_not_count() -> None:
    first = agent(PAIRS, refinement=EAGER)
    heard(first, "c", 4000.0, 0, None, 5, 5)
    first.peer_lost("c", ROOMY, 4500.0)
    assert moved(tick(first, 5000.0)) == []


# -- what is handed off


def test_a_request_beyond_a_refined_boundary_goes_to_the_next_stage_though_the_plan_covers_it() -> None:
    counting = RefinementParameters(Refinement.QUANTITY, smoothing=1.0, fewest_requests=2, interval_s=5.0)
    first = agent(PAIRS, refinement=counting, rebalance=False)
    heard(first, "c", 5000.0, 0, None, 900)
    told = tick(first, 5000.0, 300, 950)
    assert moved(told) == [900]
    assert asks(told) == [("950", "c"), ("950", "d")]


def test_no_more_are_offered_than_there_is_room_for() -> None:
    first = agent(PAIRS, limits=BidAskLimits(deals=2), rebalance=False)
    assert asks(tick(first, 0.0, 1300, 1200, 1100)) == [(each, peer) for each in ("1300", "1200") for peer in "cd"]


def test_successors_take_turns_in_their_order() -> None:
    layout = StageLayout("m", 1, (("a",), ("b", "c", "d")), (1000,))
    first = agent(layout, routing_mode=RoutingMode.ROUND_ROBIN, rebalance=False)
    told = asks(tick(first, 0.0, 1600, 1500, 1400, 1300))
    assert [request_id for request_id, _ in told] == ["1600", "1500", "1400", "1300"]
    assert [peer for _, peer in told] == ["c", "d", "b", "c"]


@pytest.mark.parametrize("how", ["nobody answers", "the only one is lost"])
def test_what_found_no_taker_is_offered_again_after_a_rest(how: str) -> None:
    first = agent(LINE, retry_s=2.0)
    assert asks(tick(first, 0.0, 150)) == [("150", "b")]
    if how == "nobody answers":
        assert Closed("150", "", False, "nobody can take it") not in tick(first, LIMITS.bids_ms - 1, 150)
        closed_ms = 600.0
        told = tick(first, closed_ms, 150)
        assert "b" in reports(told), "all that is due is said"
    else:
        closed_ms = 100.0
        told = first.peer_lost("b", ROOMY, closed_ms)
    assert Closed("150", "", False, "nobody can take it") in told
    assert asks(tick(first, closed_ms + 1999.0, 150)) == []
    assert asks(tick(first, closed_ms + 2000.0, 150)) == [("150", "b")]


# -- what is evened out within the stage


def overloaded(**parameters: Any) -> StageAgent:
    first = agent(StageLayout("m", 1, (("a", "b"), ("c",)), (1000,)), **parameters)
    heard(first, "b", 0.0, 0, 1000)
    return first


def test_what_is_above_the_mean_is_offered_and_what_is_on_offer_counts_as_gone() -> None:
    first = overloaded()
    assert asks(tick(first, 0.0, 100, 200, 300, 400)) == [("400", "b"), ("100", "b")]
    heard(first, "b", 50.0, 500, 1000)
    assert asks(tick(first, 100.0, 100, 200, 300, 400)) == [], "500 will be left, which is the mean"
    assert asks(tick(first, 110.0, 100, 200, 300, 400, 900)) == [("300", "b")], "450 too many, and 400 goes already"


@pytest.mark.parametrize(("request_id", "ceiling"), [("400", 200), ("100", 400)])
@pytest.mark.parametrize("above", [0, 1])
def test_a_taker_must_stay_lighter_than_the_giver(request_id: str, ceiling: int, above: int) -> None:
    """As heavy as the giver is left, with the request: 1000 - 400, and then 600 - 100."""
    first = overloaded()
    told = tick(first, 0.0, 100, 200, 300, 400)
    (ask,) = [
        each.message
        for each in told
        if isinstance(each, ToPeer) and isinstance(each.message, Ask) and each.message.request_id == request_id
    ]
    (answer, *_) = first.receive("b", Bid(ask.ask_id, ceiling + above, 0.0), ROOMY, 1.0)
    assert isinstance(answer, Closed if above else ToPeer)


def test_only_those_below_the_mean_are_asked() -> None:
    first = agent(StageLayout("m", 1, (("a", "b", "c"),), ()))
    heard(first, "b", 0.0, 600)
    heard(first, "c", 0.0, 200)
    assert asks(tick(first, 0.0, 300, 700)) == [("300", "c")], "b carries the mean"


def test_what_fills_the_range_may_be_evened_out() -> None:
    first = overloaded()
    assert asks(tick(first, 0.0, 1000, 1000)) == [("1000", "b")]


def test_what_found_no_taker_rests_within_the_stage_too() -> None:
    first = overloaded(retry_s=2.0)
    assert asks(tick(first, 0.0, 400, 400)) == [("400", "b")]
    assert any(isinstance(each, Closed) for each in tick(first, 200.0, 400, 400))
    assert asks(tick(first, 300.0, 400, 400)) == []


def test_who_has_just_come_stays_for_a_while() -> None:
    first = overloaded(settle_s=2.5)
    first.receive("b", Award("b-1", "400", 400, 400), ROOMY, 0.0)
    first.receive("b", Begun("b-1"), ROOMY, 0.0)
    first.receive("b", Done("b-1", True), ROOMY, 0.0)
    arrived = (RunningRequest("400", 400, 1), RunningRequest("450", 450, 1))
    told = first.tick(Capacity(850, 0), arrived, 2499.0)
    assert asks(told) == []
    told = first.tick(Capacity(850, 0), arrived, 2500.0)
    assert asks(told) == [("400", "b")]


def test_a_promise_is_asked_for_again_until_it_is_answered() -> None:
    first = agent(PAIRS)
    accepted, ready = first.receive("b", Award("b-1", "r", 10, 10), ROOMY, 0.0)
    assert (accepted, ready) == (ToPeer("b", Accepted("b-1")), ToPeer("b", Ready("b-1", 1)))
    assert ready not in tick(first, LIMITS.resend_ms - 1)
    assert ready in tick(first, LIMITS.resend_ms)
    first.receive("b", Busy("b-1", 1), ROOMY, LIMITS.resend_ms)
    assert ToPeer("b", Ready("b-1", 2)) in tick(first, LIMITS.resend_ms + LIMITS.retry_ms)
    first.receive("c", Award("c-1", "s", 10, 10), ROOMY, LIMITS.resend_ms)
    full = first.tick(Capacity(0, 0), (), inf)
    assert not first.receiver.senders, f"nothing is promised for ever: {full}"
