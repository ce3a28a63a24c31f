"""The side that has requests to hand over, alone: what it does about each event in each state of a deal."""

from collections.abc import Callable

import pytest

from controlplane.protocols.bid_ask import messages
from controlplane.protocols.bid_ask.sender import (
    BidAskSender,
    Closed,
    DealState,
    Migrate,
    MigrationEnded,
    PeerLost,
    RequestEnded,
    Send,
    SenderEvent,
    SenderInstruction,
    Tick,
)
from tests.unit.controlplane.protocols.bid_ask_model import LIMITS

AWARD = Send("b", messages.Award("a-1", "r", 10, 10, "f"))
BEGUN = Send("b", messages.Begun("a-1"))
BEGINS = (BEGUN, Migrate("r", "b"))


def asking() -> BidAskSender:
    giver = BidAskSender("a", LIMITS)
    ask = messages.Ask("a-1", "r", 10, 10, "f")
    assert giver.offer("r", 10, ("b", "c"), 0.0, frontend_id="f") == (Send("b", ask), Send("c", ask))
    return giver


def awarding() -> BidAskSender:
    giver = asking()
    assert giver.receive("b", messages.Bid("a-1", 0, 0.0), 1.0) == ()
    assert giver.receive("c", messages.Pass("a-1", "full"), 2.0) == (AWARD,)
    return giver


def promised() -> BidAskSender:
    giver = awarding()
    assert giver.receive("b", messages.Accepted("a-1"), 5.0) == ()
    return giver


def moving() -> BidAskSender:
    giver = promised()
    assert giver.receive("b", messages.Ready("a-1", 1), 8.0) == BEGINS
    return giver


def closed(receiver: str, reason: str, *, moved: bool = False) -> Closed:
    return Closed("r", receiver, moved, reason)


def withdrawn(reason: str, instance_id: str = "b") -> Send:
    return Send(instance_id, messages.Withdrawn("a-1", reason))


ENDED = "the request ended"


@pytest.mark.parametrize(
    ("given", "event", "instructions", "state"),
    [
        (asking, RequestEnded("r"), (closed("", ENDED),), None),
        (awarding, RequestEnded("r"), (withdrawn(ENDED), closed("b", ENDED)), None),
        (promised, RequestEnded("r"), (withdrawn(ENDED), closed("b", ENDED)), None),
        (moving, RequestEnded("r"), (), DealState.MOVING),
        (promised, RequestEnded("another"), (), DealState.PROMISED),
        (asking, PeerLost("b"), (), DealState.ASKING),
        (awarding, PeerLost("c"), (), DealState.AWARDING),
        (awarding, PeerLost("b"), (closed("b", "the receiver is gone"),), None),
        (promised, PeerLost("b"), (closed("b", "the receiver is gone"),), None),
        (moving, PeerLost("b"), (), DealState.MOVING),
        (promised, MigrationEnded("r", True), (), DealState.PROMISED),
        (moving, MigrationEnded("another", True), (), DealState.MOVING),
        (
            moving,
            MigrationEnded("r", True),
            (Send("b", messages.Done("a-1", True)), closed("b", "", moved=True)),
            None,
        ),
        (
            moving,
            MigrationEnded("r", False, "torn"),
            (Send("b", messages.Done("a-1", False)), closed("b", "torn")),
            None,
        ),
    ],
)
def test_what_is_done_about_an_event(
    given: Callable[[], BidAskSender],
    event: SenderEvent,
    instructions: tuple[SenderInstruction, ...],
    state: DealState | None,
) -> None:
    giver = given()
    assert giver.handle(event, 20.0) == instructions
    giver.validate()
    assert giver.state_of("r") is state
    assert giver.offered == (("r",) if state else ())


@pytest.mark.parametrize(
    ("given", "sender", "message", "instructions", "state"),
    [
        (asking, "d", messages.Bid("a-1", 0, 0.0), (), DealState.ASKING),
        (awarding, "c", messages.Bid("a-1", 0, 0.0), (), DealState.AWARDING),
        (awarding, "c", messages.Accepted("a-1"), (withdrawn("it is promised to somebody else", "c"),), "awarding"),
        (awarding, "b", messages.Refused("a-1", "full"), (closed("b", "full"),), None),
        (promised, "b", messages.Refused("a-1", "full"), (closed("b", "full"),), None),
        (moving, "b", messages.Refused("a-1", "full"), (), DealState.MOVING),
        (promised, "b", messages.Accepted("a-1"), (), DealState.PROMISED),
        (awarding, "b", messages.Ready("a-1", 1), BEGINS, DealState.MOVING),
        (awarding, "b", messages.Starving("a-1", 1), BEGINS, DealState.MOVING),
        (promised, "b", messages.Starving("a-1", 1), BEGINS, DealState.MOVING),
        (moving, "b", messages.Ready("a-1", 2), (BEGUN,), DealState.MOVING),
        (moving, "b", messages.Starving("a-1", 2), (BEGUN,), DealState.MOVING),
    ],
)
def test_what_is_done_about_a_message(
    given: Callable[[], BidAskSender],
    sender: str,
    message: messages.ToSender,
    instructions: tuple[SenderInstruction, ...],
    state: DealState | None,
) -> None:
    giver = given()
    assert giver.receive(sender, message, 20.0) == instructions
    giver.validate()
    assert giver.state_of("r") == state


@pytest.mark.parametrize(
    ("message", "is_answered"),
    [
        (messages.Accepted("old"), True),
        (messages.Ready("old", 1), True),
        (messages.Starving("old", 1), True),
        (messages.Refused("old", "full"), False),
        (messages.Bid("old", 0, 0.0), False),
    ],
)
def test_who_waits_for_what_is_not_on_offer_is_told_so(message: messages.ToSender, is_answered: bool) -> None:
    told = Send("d", messages.Withdrawn("old", "it is not on offer (any more)"))
    assert asking().receive("d", message, 1.0) == ((told,) if is_answered else ())


def test_the_choice_is_made_among_the_bids_that_came_in_time() -> None:
    giver = asking()
    giver.receive("b", messages.Bid("a-1", 0, 0.0), 1.0)
    assert giver.handle(Tick(), LIMITS.bids_ms - 1) == ()
    assert giver.handle(Tick(), LIMITS.bids_ms) == (AWARD,)
    assert giver.promised_to("r") == "b"
    assert asking().handle(Tick(), LIMITS.bids_ms) == (closed("", "nobody can take it"),)


def test_the_bids_count_from_the_question() -> None:
    giver = BidAskSender("a", LIMITS)
    giver.offer("r", 10, ("b",), 1_000.0)
    assert giver.handle(Tick(), 1_000.0 + LIMITS.bids_ms - 1) == ()
    assert giver.handle(Tick(), 1_000.0 + LIMITS.bids_ms) == (closed("", "nobody can take it"),)


def test_one_that_is_lost_is_not_waited_for_and_its_bid_is_void() -> None:
    giver = asking()
    giver.receive("b", messages.Bid("a-1", 0, 0.0), 1.0)
    assert giver.handle(PeerLost("c"), 50.0) == (AWARD,)
    assert giver.handle(Tick(), 50.0 + LIMITS.resend_ms - 1) == ()
    assert giver.handle(Tick(), 50.0 + LIMITS.resend_ms) == (AWARD,)
    other = asking()
    other.receive("b", messages.Bid("a-1", 0, 0.0), 1.0)
    assert other.handle(PeerLost("b"), 2.0) == ()
    assert other.receive("c", messages.Pass("a-1", "full"), 3.0) == (closed("", "nobody can take it"),)


def test_an_award_is_sent_again_until_it_is_answered_or_too_old() -> None:
    giver = awarding()
    for number in range(1, 10):
        due_ms = 2.0 + number * LIMITS.resend_ms
        assert giver.handle(Tick(), due_ms - 1) == ()
        assert giver.handle(Tick(), due_ms) == (AWARD,)
    reason = "the receiver did not answer the award"
    assert giver.handle(Tick(), 2.0 + LIMITS.award_ms) == (withdrawn(reason), closed("b", reason))


def test_no_transfer_begins_when_its_promise_is_over() -> None:
    giver = promised()
    at_ms = 2.0 + LIMITS.promise_ms
    assert giver.receive("b", messages.Ready("a-1", 1), at_ms) == (Send("b", messages.Busy("a-1", 1)),)
    assert promised().receive("b", messages.Ready("a-1", 1), at_ms - 1) == BEGINS
    reason = "the receiver had no slot for it in time"
    assert giver.handle(Tick(), at_ms) == (withdrawn(reason), closed("b", reason))


def test_one_that_cannot_begin_is_promised_all_the_same() -> None:
    """Ready and Starving say that the award has come, even where the acceptance was lost."""
    for message in (messages.Ready("a-2", 1), messages.Starving("a-2", 1)):
        giver = moving()
        giver.offer("s", 20, ("b",), 10.0)
        giver.receive("b", messages.Bid("a-2", 0, 0.0), 11.0)
        busy = (Send("b", messages.Busy("a-2", 1)),) if isinstance(message, messages.Ready) else ()
        assert giver.receive("b", message, 12.0) == busy
        assert giver.state_of("s") is DealState.PROMISED
        giver.validate()


def test_its_load_is_all_that_it_offers() -> None:
    giver = asking()
    assert giver.offer("s", 20, ("d",), 1.0) == (Send("d", messages.Ask("a-2", "s", 20, 30)),)
    assert giver.receive("d", messages.Bid("a-2", 0, 0.0), 2.0) == (Send("d", messages.Award("a-2", "s", 20, 30)),)
    assert giver.offer("s", 20, ("d",), 3.0) == (), "it is on offer"
    assert giver.offer("t", 20, (), 3.0) == (), "to nobody"
    assert (giver.offered, giver.promised_to("r"), giver.promised_to("s")) == (("r", "s"), None, "d")


def test_of_those_that_starve_the_first_begins_when_a_transfer_ends() -> None:
    giver = moving()
    for number, name in ((2, "s"), (3, "t")):
        giver.offer(name, 20, ("b",), 10.0)
        giver.receive("b", messages.Bid(f"a-{number}", 0, 0.0), 11.0)
        giver.receive("b", messages.Starving(f"a-{number}", 3), 12.0)
    ended = giver.handle(MigrationEnded("r", True), 20.0)
    assert ended[2:] == (Send("b", messages.Begun("a-2")), Migrate("s", "b"))
    assert giver.receive("b", messages.Ready("a-3", 4), 21.0) == (Send("b", messages.Busy("a-3", 4)),)
    assert giver.handle(MigrationEnded("s", True), 22.0)[2:] == (Send("b", messages.Begun("a-3")), Migrate("t", "b"))
