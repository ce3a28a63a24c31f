"""The side that takes requests, alone: what it bids, takes, asks for again and drops."""

import pytest

from controlplane.protocols.bid_ask import messages
from controlplane.protocols.bid_ask.receiver import BidAskReceiver, Capacity, EntryState, Send
from mesh.errors import IllegalTransition
from tests.unit.controlplane.protocols.bid_ask_model import LIMITS

ROOMY = Capacity(load_tokens=100, idle_tokens=100_000)


def award(name: str, *, tokens: int = 10, load: int = 10, number: int = 1) -> messages.Award:
    """Of the `number`-th request of the sender `name`."""
    return messages.Award(f"{name}-{number}", f"r{name}", tokens, load, "f")


def ready() -> BidAskReceiver:
    """With one promise, whose sender was told to begin."""
    taker = BidAskReceiver(LIMITS)
    told = taker.receive("s", award("s"), ROOMY, 0.0)
    assert told == (Send("s", messages.Accepted("s-1")), Send("s", messages.Ready("s-1", 1)))
    return taker


@pytest.mark.parametrize(
    ("capacity", "reason"),
    [
        (Capacity(0, 100, accepts=False), "the instance takes nothing new"),
        (Capacity(0, 100, transfer_obstacle="no route"), "no request can be moved to it: no route"),
        (Capacity(0, 100, frontends=frozenset({"g"})), "unreachable: frontend f has no stream to it"),
        (Capacity(0, 29), "no idle cache: 20 tokens needed, 19 idle"),
    ],
)
def test_what_it_cannot_take_it_neither_bids_for_nor_accepts(capacity: Capacity, reason: str) -> None:
    taker = ready()
    passed = taker.receive("t", messages.Ask("t-1", "rt", 20, 20, "f"), capacity, 1.0)
    assert passed == (Send("t", messages.Pass("t-1", reason)),)
    assert taker.receive("t", award("t", tokens=20), capacity, 2.0) == (Send("t", messages.Refused("t-1", reason)),)
    taker.validate()
    assert taker.senders == {"s"}


def test_what_fits_exactly_it_bids_for() -> None:
    capacity = Capacity(7, 30, frontends=frozenset({"f"}))
    (bid,) = ready().receive("t", messages.Ask("t-1", "rt", 20, 20, "f"), capacity, 1.0)
    assert bid == Send("t", messages.Bid("t-1", 17, 1000 * 10 / LIMITS.throughput_tokens_s))


def test_only_so_many_are_promised_to_it() -> None:
    taker = BidAskReceiver(LIMITS)
    for name in "abcd":
        assert Send(name, messages.Accepted(f"{name}-1")) in taker.receive(name, award(name), ROOMY, 0.0)
    refused = taker.receive("e", award("e"), ROOMY, 1.0)
    assert refused == (Send("e", messages.Refused("e-1", "4 requests are promised to it already")),)
    taker.validate()


def test_a_doubled_award_is_accepted_again_and_counts_once() -> None:
    taker = ready()
    assert taker.receive("s", award("s"), Capacity(0, 0, accepts=False), 1.0) == (Send("s", messages.Accepted("s-1")),)
    assert (taker.promised_tokens, taker.state_of("s-1"), taker.request_of("s-1")) == (10, EntryState.READY, "rs")
    assert taker.request_of("s-2") is None


def test_it_asks_again_for_what_it_holds_a_slot_for() -> None:
    taker = ready()
    again = (Send("s", messages.Ready("s-1", 1)),)
    for sent_ms in (0.0, LIMITS.resend_ms):
        assert taker.tick(ROOMY, sent_ms + LIMITS.resend_ms - 1) == ()
        assert taker.tick(ROOMY, sent_ms + LIMITS.resend_ms) == again
    sent_ms = 2 * LIMITS.resend_ms
    taker.receive("s", messages.Begun("s-1"), ROOMY, sent_ms + 1)
    assert taker.state_of("s-1") is EntryState.RECEIVING
    assert taker.tick(ROOMY, sent_ms + LIMITS.probe_ms - 1) == (), "a transfer runs, and is asked after less often"
    assert taker.tick(ROOMY, sent_ms + LIMITS.probe_ms) == again


def test_a_promise_that_is_overdue_is_dropped_and_makes_room() -> None:
    taker = ready()
    taker.receive("t", award("t"), ROOMY, 1.0)
    taker.receive("u", award("u"), ROOMY, 2.0)
    overdue_ms = LIMITS.promise_ms + LIMITS.transfer_ms
    taker.tick(ROOMY, overdue_ms - 1)
    assert taker.state_of("s-1") is EntryState.READY
    told = taker.tick(ROOMY, overdue_ms)
    assert taker.state_of("s-1") is None
    assert Send("u", messages.Ready("u-1", 1)) in told, "it had waited for a slot"
    assert taker.senders == {"t", "u"}
    taker.validate()


def test_a_promise_whose_slot_is_free_again_is_attempted_though_another_sender_is_busy() -> None:
    taker = BidAskReceiver(LIMITS)
    taker.receive("s", award("s", load=90), ROOMY, 0.0)
    assert taker.receive("s", award("s", load=90, number=2), ROOMY, 1.0) == (Send("s", messages.Accepted("s-2")),)
    told = taker.receive("t", award("t"), ROOMY, 2.0)
    assert told == (Send("t", messages.Accepted("t-1")), Send("t", messages.Ready("t-1", 1)))
    assert taker.state_of("s-2") is EntryState.QUEUED, "its sender has one to move already"


def test_one_that_has_become_too_large_makes_way_for_one_that_fits() -> None:
    taker = BidAskReceiver(LIMITS)
    for name, tokens, load in (("s", 10, 10), ("t", 10, 10), ("u", 50, 90), ("v", 5, 10)):
        taker.receive(name, award(name, tokens=tokens, load=load), ROOMY, 0.0)
    told = taker.receive("s", messages.Done("s-1", True), Capacity(0, 20), 5.0)
    reason = "no idle cache: 50 tokens needed, 10 idle"
    assert told == (Send("u", messages.Refused("u-1", reason)), Send("v", messages.Ready("v-1", 1)))
    assert taker.state_of("u-1") is None
    taker.validate()


def test_a_sender_that_is_busy_is_tried_again_after_a_pause_and_then_starves() -> None:
    taker, now_ms = ready(), 0.0
    for attempt in range(1, LIMITS.starving_after + 1):
        assert taker.receive("s", messages.Busy("s-1", attempt - 1), ROOMY, now_ms) == (), "an old answer"
        assert taker.state_of("s-1") is EntryState.READY
        assert taker.receive("s", messages.Busy("s-1", attempt), ROOMY, now_ms) == ()
        assert taker.state_of("s-1") is EntryState.QUEUED
        now_ms += LIMITS.retry_ms
        assert taker.tick(ROOMY, now_ms - 1) == ()
        kind = messages.Starving if attempt == LIMITS.starving_after else messages.Ready
        assert taker.tick(ROOMY, now_ms) == (Send("s", kind("s-1", attempt + 1)),)
    assert taker.state_of("s-1") is EntryState.WAITING
    taker.receive("s", messages.Begun("s-1"), ROOMY, now_ms)
    assert taker.state_of("s-1") is EntryState.RECEIVING


@pytest.mark.parametrize("moved", [True, False])
def test_what_came_is_counted_and_what_did_not_is_dropped(moved: bool) -> None:
    taker = ready()
    throughput = taker.throughput_tokens_s
    assert taker.receive("s", messages.Done("s-1", moved), ROOMY, 9.0) == ()
    assert (taker.received, taker.state_of("s-1"), taker.holding) == (int(moved), None, 0)
    assert taker.throughput_tokens_s == throughput, "nobody has seen it begin"


def test_the_end_of_one_that_waits_is_that_of_a_former_promise() -> None:
    taker = ready()
    taker.receive("s", messages.Busy("s-1", 1), ROOMY, 1.0)
    taker.receive("s", messages.Done("s-1", True), ROOMY, 2.0)
    assert (taker.received, taker.state_of("s-1"), taker.senders) == (0, None, frozenset())


def test_a_sender_speaks_of_its_own_promises_only() -> None:
    taker = ready()
    taker.receive("t", messages.Withdrawn("s-1", "mine"), ROOMY, 1.0)
    assert taker.state_of("s-1") is EntryState.READY
    taker.receive("s", messages.Withdrawn("s-1", "never mind"), ROOMY, 2.0)
    assert taker.state_of("s-1") is None


def test_with_a_sender_that_is_lost_go_its_promises_alone() -> None:
    taker = ready()
    taker.receive("t", award("t"), ROOMY, 0.0)
    taker.receive("u", award("u"), ROOMY, 0.0)
    assert taker.lost("s", ROOMY, 5.0) == (Send("u", messages.Ready("u-1", 1)),)
    assert taker.senders == {"t", "u"}
    taker.validate()


def test_of_one_sender_one_is_attempted_at_a_time() -> None:
    taker = ready()
    taker.receive("s", messages.Busy("s-1", 1), ROOMY, 0.0)
    assert Send("s", messages.Ready("s-2", 1)) in taker.receive("s", award("s", number=2), ROOMY, 1.0)
    taker.receive("s", messages.Busy("s-2", 1), ROOMY, 2.0)
    assert taker.tick(ROOMY, 2.0 + LIMITS.retry_ms) == (Send("s", messages.Ready("s-1", 2)),)


def test_the_load_of_a_sender_is_the_one_last_heard_of() -> None:
    taker = BidAskReceiver(LIMITS)
    for name in "stuv":
        taker.receive(name, award(name, load={"u": 20, "v": 10}.get(name, 1)), ROOMY, 0.0)
    taker.receive("v", messages.Ask("v-9", "other", 1, 99), ROOMY, 1.0)
    assert taker.receive("s", messages.Done("s-1", True), ROOMY, 2.0) == (Send("v", messages.Ready("v-1", 1)),)


def test_illegal_transitions_tell_the_story() -> None:
    taker = ready()
    entry = taker._entries["s-1"]
    with pytest.raises(
        IllegalTransition, match="promise s-1: ready cannot become waiting; 0 ms: promised by s; 0 ms: ready"
    ):
        taker._enter(entry, EntryState.WAITING, 1.0)
