"""Bid-ask over a network that loses, doubles and delays, with crashes at any moment; then its rules one by one."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from controlplane.protocols.bid_ask import messages, receiver, sender
from controlplane.protocols.bid_ask.receiver import BidAskReceiver, Capacity, EntryState
from controlplane.protocols.bid_ask.sender import (
    BidAskSender,
    Closed,
    DealState,
    Migrate,
    MigrationEnded,
    Offer,
    PeerLost,
    Tick,
    choose,
)
from mesh.errors import IllegalTransition
from tests.examples import examples
from tests.unit.controlplane.protocols.bid_ask_model import KV_TOKENS, LIMITS, Cluster

ROOMY = Capacity(load_tokens=100, idle_tokens=100_000)


class Chaos(RuleBasedStateMachine):
    """Hypothesis chooses what happens next."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster()

    names = st.sampled_from(["a", "b", "c"])

    @rule(name=names, tokens=st.integers(1, 80), offered=st.booleans())
    def new_request(self, name: str, tokens: int, offered: bool) -> None:
        if sum(self.cluster.nodes[name].requests.values()) + tokens <= KV_TOKENS:
            request_id = self.cluster.new_request(name, tokens)
            if offered:
                self.cluster.offer(name, request_id)

    @rule(name=names, data=st.data())
    def offer_again(self, name: str, data: st.DataObject) -> None:
        requests = sorted(self.cluster.nodes[name].requests)
        if requests:
            self.cluster.offer(name, data.draw(st.sampled_from(requests)))

    @precondition(lambda self: self.cluster.packets)
    @rule(data=st.data(), keep=st.booleans())
    def arrive(self, data: st.DataObject, keep: bool) -> None:
        self.cluster.arrive(data.draw(st.integers(0, len(self.cluster.packets) - 1)), keep=keep)

    @precondition(lambda self: self.cluster.packets)
    @rule(count=st.integers(1, 8))
    def arrive_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.cluster.packets))):
            self.cluster.arrive()

    @precondition(lambda self: self.cluster.packets)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.cluster.packets.pop(data.draw(st.integers(0, len(self.cluster.packets) - 1)))

    @rule(ms=st.sampled_from([1.0, 30.0, 160.0, 1100.0, 31_000.0, 170_000.0]))
    def pass_time(self, ms: float) -> None:
        self.cluster.pass_time(ms)

    @precondition(lambda self: self.cluster.migrations)
    @rule(data=st.data(), moves=st.booleans())
    def end_migration(self, data: st.DataObject, moves: bool) -> None:
        self.cluster.end_migration(data.draw(st.integers(0, len(self.cluster.migrations) - 1)), moves=moves)

    @rule(name=names, data=st.data())
    def end_request(self, name: str, data: st.DataObject) -> None:
        free = [each for each in sorted(self.cluster.nodes[name].requests) if not self.cluster.is_moving(each)]
        if free:
            self.cluster.end_request(name, data.draw(st.sampled_from(free)))

    @rule(name=names)
    def crash(self, name: str) -> None:
        self.cluster.crash(name)

    @invariant()
    def holds(self) -> None:
        self.cluster.check()

    def teardown(self) -> None:
        self.cluster.settle()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(max_examples=examples(150), stateful_step_count=60, deadline=None)


def one_step(cluster: Cluster, rng: Random) -> None:
    """Something happens, mostly what happens on a bad network under load."""
    names = list(cluster.nodes)
    what = {
        "arrive": 80,
        "double": 5,
        "lose": 2,
        "offer": 6,
        "finish": 3,
        "end": 5,
        "wait": 4,
        "pause": 0.2,
        "crash": 0.2,
    }
    match rng.choices(list(what), list(what.values()))[0]:
        case "offer":
            name = rng.choice(names)
            if sum(cluster.nodes[name].requests.values()) <= KV_TOKENS / 2:
                cluster.offer(name, cluster.new_request(name, rng.randint(1, 10)))
        case "finish":
            name = rng.choice(names)
            free = [each for each in cluster.nodes[name].requests if not cluster.is_moving(each)]
            if free:
                cluster.end_request(name, rng.choice(free))
        case "end" if cluster.migrations:
            cluster.end_migration(rng.randrange(len(cluster.migrations)), moves=rng.random() < 0.8)
        case "wait":
            cluster.pass_time(rng.choice((5.0, 25.0, 120.0)))
        case "pause":
            cluster.pass_time(rng.choice((1_100.0, 31_000.0, 170_000.0)))
        case "crash":
            cluster.crash(rng.choice(names))
        case "arrive" | "double" | "lose" as fate if cluster.packets:
            index = rng.randrange(min(len(cluster.packets), 12))
            if fate == "lose":
                cluster.packets.pop(index)
            else:
                cluster.arrive(index, keep=fate == "double")


@pytest.mark.slow
def test_long_runs_in_bad_weather() -> None:
    begun = 0
    for seed in range(40):
        cluster, rng = Cluster(("a", "b", "c", "d")), Random(seed)
        for _ in range(1500):
            one_step(cluster, rng)
            cluster.check()
        cluster.settle()
        begun += len(cluster.begun)
    assert begun > 40 * 20, "hardly anything moved"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=9))
def test_the_winner_is_light_early_and_first(bids: list[tuple[int, int]]) -> None:
    offers = [Offer(f"i{number}", load, float(start)) for number, (load, start) in enumerate(bids)]
    won = choose(offers, 3)
    assert won is not None
    lighter = sum(offer.load_tokens < won.load_tokens for offer in offers)
    assert lighter < len(offers) - len(offers) // 2, "it is of the more loaded half"
    light = sorted(offers, key=lambda offer: offer.load_tokens)[: len(offers) - len(offers) // 2]
    earlier = sum(offer.earliest_start_ms < won.earliest_start_ms for offer in light)
    assert earlier < 3


def test_the_choice_of_the_paper() -> None:
    """Eight bids in the order of arrival: the heavy half goes, then the latest, then the first of three wins."""
    loads = [(90, 0), (10, 400), (80, 0), (20, 300), (70, 0), (30, 200), (60, 0), (40, 100)]
    offers = [Offer(str(number), load, start) for number, (load, start) in enumerate(loads)]
    won = choose(offers, 3)
    assert won is not None
    assert won.instance_id == "3"
    assert choose([], 3) is None


def run(cluster: Cluster, *, migrations_end: bool = True) -> None:
    """Deliver everything, in order, until nothing is under way."""
    while cluster.packets or (migrations_end and cluster.migrations):
        if cluster.packets:
            cluster.arrive()
        else:
            cluster.end_migration()
        cluster.check()


def test_a_request_goes_to_the_lighter_instance() -> None:
    cluster = Cluster()
    cluster.new_request("b", 200)
    request_id = cluster.new_request("a", 50)
    cluster.offer("a", request_id)
    run(cluster)
    assert request_id in cluster.nodes["c"].requests
    assert cluster.closed == [Closed(request_id, "c", True, "")]


def test_without_idle_cache_nothing_moves() -> None:
    cluster = Cluster()
    for other in ("b", "c"):
        cluster.new_request(other, KV_TOKENS - 10)
    request_id = cluster.new_request("a", 50)
    cluster.offer("a", request_id)
    run(cluster)
    assert request_id in cluster.nodes["a"].requests
    assert cluster.closed == [Closed(request_id, "", False, "nobody can take it")]


def test_idle_cache_that_is_gone_when_its_turn_comes_keeps_the_request() -> None:
    taker = BidAskReceiver(LIMITS)
    for number in range(2):
        award = messages.Award(f"s{number}-1", f"r{number}", 40, 40)
        taker.receive(f"s{number}", award, Capacity(0, 100), 0.0)
    late = taker.receive("s2", messages.Award("s2-1", "r2", 10, 10), Capacity(0, 100), 1.0)
    assert late == (receiver.Send("s2", messages.Accepted("s2-1")),), "both slots are held"
    freed = taker.receive("s0", messages.Done("s0-1", True), Capacity(60, 45), 2.0)
    assert isinstance(freed[0].message, messages.Refused)
    assert taker.state_of("s2-1") is None


def test_the_more_loaded_sender_comes_first_and_a_busy_one_is_skipped() -> None:
    taker = BidAskReceiver(LIMITS)
    full = Capacity(0, 0, accepts=False)
    for name, load in (("light", 10), ("heavy", 90), ("middle", 50)):
        sends = taker.receive(name, messages.Award(f"{name}-1", name, 10, load), ROOMY, 0.0)
        assert sends[0].message == messages.Accepted(f"{name}-1")
    assert full.accepts is False
    assert taker.state_of("light-1") is EntryState.READY, "it came first and a slot was free"
    assert taker.state_of("heavy-1") is EntryState.READY
    assert taker.state_of("middle-1") is EntryState.QUEUED
    skipped = taker.receive("heavy", messages.Busy("heavy-1", 1), ROOMY, 1.0)
    assert skipped == (receiver.Send("middle", messages.Ready("middle-1", 1)),)
    freed = taker.receive("light", messages.Done("light-1", True), ROOMY, 100.0)
    assert freed == (receiver.Send("heavy", messages.Ready("heavy-1", 2)),)


def test_a_starving_request_is_begun_next() -> None:
    cluster = Cluster(("a", "b", "c"))
    starved = cluster.new_request("a", 10)
    cluster.offer("a", starved, to=("b",))
    first = cluster.new_request("a", 10)
    cluster.offer("a", first, to=("c",))
    # Bids and awards of both; the one for c begins.
    packets = [p for p in cluster.packets if p.target == "c"] + [p for p in cluster.packets if p.target == "b"]
    cluster.packets[:] = packets
    run(cluster, migrations_end=False)
    assert cluster.begun == [first]
    for _ in range(LIMITS.starving_after + 1):
        cluster.pass_time(LIMITS.retry_ms)
        run(cluster, migrations_end=False)
    rival = cluster.new_request("a", 10)
    cluster.offer("a", rival, to=("c",))
    run(cluster, migrations_end=False)
    assert cluster.begun == [first], "the sender is still busy"
    cluster.end_migration()
    assert cluster.begun == [first, starved]
    run(cluster)
    cluster.pass_time(LIMITS.retry_ms)
    run(cluster)
    assert cluster.begun == [first, starved, rival]


def test_every_offer_is_answered_or_given_up_without_any_message_arriving() -> None:
    cluster = Cluster()
    request_id = cluster.new_request("a", 10)
    cluster.offer("a", request_id)
    cluster.packets.clear()
    cluster.pass_time(LIMITS.bids_ms)
    assert cluster.closed == [Closed(request_id, "", False, "nobody can take it")]


def test_a_bid_over_the_ceiling_does_not_count() -> None:
    giver = BidAskSender("a", LIMITS)
    giver.offer("r", 10, ("b",), 0.0, ceiling_tokens=99)
    (closed,) = giver.receive("b", messages.Bid("a-1", 100, 0.0), 1.0)
    assert isinstance(closed, Closed)
    assert not closed.moved
    giver.offer("r", 10, ("b",), 0.0, ceiling_tokens=100)
    giver.receive("b", messages.Bid("a-2", 100, 0.0), 1.0)
    assert giver.promised_to("r") == "b"


def test_only_so_many_are_offered_at_once() -> None:
    giver = BidAskSender("a", LIMITS)
    for number in range(LIMITS.deals):
        assert giver.offer(f"r{number}", 10, ("b",), 0.0)
    assert not giver.has_room
    assert giver.offer("one more", 10, ("b",), 0.0) == ()


def test_a_lost_receiver_frees_the_request() -> None:
    giver = BidAskSender("a", LIMITS)
    giver.offer("r", 10, ("b", "c"), 0.0)
    giver.receive("b", messages.Bid("a-1", 0, 0.0), 1.0)
    giver.receive("c", messages.Pass("a-1", "full"), 1.0)
    assert giver.promised_to("r") == "b"
    giver.handle(PeerLost("b"), 2.0)
    assert giver.state_of("r") is None
    assert giver.offer("r", 10, ("c",), 3.0)


def test_an_attempt_answered_busy_is_never_acted_on_later() -> None:
    giver = BidAskSender("a", LIMITS)
    for number in (1, 2):
        giver.offer(f"r{number}", 10, ("b",), 0.0)
        giver.receive("b", messages.Bid(f"a-{number}", 0, 0.0), 0.0)
    assert sender.Send("b", messages.Begun("a-1")) in giver.receive("b", messages.Ready("a-1", 1), 1.0)
    busy = (sender.Send("b", messages.Busy("a-2", 1)),)
    assert giver.receive("b", messages.Ready("a-2", 1), 2.0) == busy
    giver.handle(MigrationEnded("r1", True), 3.0)
    assert giver.receive("b", messages.Ready("a-2", 1), 4.0) == busy
    assert Migrate("r2", "b") in giver.receive("b", messages.Ready("a-2", 2), 5.0)


def test_promises_end() -> None:
    giver = BidAskSender("a", LIMITS)
    giver.offer("r", 10, ("b",), 0.0)
    giver.receive("b", messages.Bid("a-1", 0, 0.0), 0.0)
    giver.receive("b", messages.Accepted("a-1"), 1.0)
    assert giver.state_of("r") is DealState.PROMISED
    assert giver.handle(Tick(), LIMITS.promise_ms - 1) == ()
    told = giver.handle(Tick(), LIMITS.promise_ms)
    assert told[0] == sender.Send("b", messages.Withdrawn("a-1", "the receiver had no slot for it in time"))


def test_throughput_is_measured() -> None:
    taker = BidAskReceiver(LIMITS)
    taker.receive("s", messages.Award("s-1", "r", 1000, 1000), ROOMY, 0.0)
    taker.receive("s", messages.Begun("s-1"), ROOMY, 10.0)
    before = taker.throughput_tokens_s
    taker.receive("s", messages.Done("s-1", True), ROOMY, 110.0)
    assert taker.throughput_tokens_s == pytest.approx(0.7 * before + 0.3 * 10_000)
    taker.receive("s", messages.Award("s-2", "r2", 500, 500), ROOMY, 200.0)
    (bid,) = taker.receive("t", messages.Ask("t-1", "r3", 10, 10), ROOMY, 200.0)
    assert bid.message == messages.Bid("t-1", 600, pytest.approx(1000 * 500 / taker.throughput_tokens_s))


def test_unknown_promises_are_withdrawn() -> None:
    giver = BidAskSender("a", LIMITS)
    (answer,) = giver.receive("b", messages.Ready("old-7", 3), 0.0)
    assert isinstance(answer, sender.Send)
    assert isinstance(answer.message, messages.Withdrawn)


def test_illegal_transitions_tell_the_story() -> None:
    giver = BidAskSender("a", LIMITS)
    giver.offer("r", 10, ("b",), 0.0)
    deal = giver._deals["a-1"]
    with pytest.raises(IllegalTransition, match=r"deal a-1 of r: asking cannot become moving; 0 ms: asked b"):
        giver._enter(deal, DealState.MOVING, 1.0)


@pytest.mark.parametrize("table", [sender.TRANSITIONS, receiver.TRANSITIONS])
def test_every_state_has_an_end(table: dict[DealState, frozenset[DealState]]) -> None:
    final = {state for state, following in table.items() if not following}
    reached = set(final)
    while True:
        more = {state for state, following in table.items() if following & reached} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(table)
