from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controlplane.model.request import MAX_TURN, EngineRequest, SamplingParams, Tenant, engine_priority
from controlplane.policies.fair_share import BURST_TOKENS, TURN_TOKENS, FairShare, turn_of

GREEDY, MODEST = Tenant("greedy"), Tenant("modest")


def test_a_single_tenant_is_served_in_the_order_of_arrival() -> None:
    shares = FairShare()
    starts = [shares.enter(number, Tenant(), 3000) for number in range(50)]
    assert starts == sorted(starts)
    assert starts[-1] > starts[0]


def test_who_comes_to_a_backlog_of_another_one_goes_first() -> None:
    shares = FairShare()
    backlog = [shares.enter(number, GREEDY, 1000) for number in range(100)]
    shares.begin(0)
    assert shares.enter("modest", MODEST, 1000) < backlog[BURST_TOKENS // 1000 + 2]
    shares.begin(60)
    assert shares.enter("later", MODEST, 1000) == backlog[60], "service is there now, and idle time earns nothing"


def test_what_was_generated_counts_against_the_next_request() -> None:
    shares = FairShare()
    for tenant in (GREEDY, MODEST):
        shares.enter(f"{tenant.name}-0", tenant, BURST_TOKENS)
    shares.charge("greedy-0", 500)
    assert shares.enter("greedy-1", GREEDY, 1) == shares.enter("modest-1", MODEST, 1) + 500


def test_the_last_to_leave_closes_all_accounts() -> None:
    shares = FairShare()
    shares.enter(1, GREEDY, 10 * BURST_TOKENS)
    shares.leave(1)
    shares.leave("never came")
    assert shares.enter(2, GREEDY, 1) == 0


@given(
    st.lists(st.integers(1, 4000), min_size=200, max_size=300),
    st.lists(st.integers(1, 4000), min_size=200, max_size=300),
    st.sampled_from((0.5, 1.0, 3.0)),
)
def test_two_backlogs_are_served_by_their_shares(first: list[int], second: list[int], share: float) -> None:
    """SFQ's bound: over any stretch in which both wait, what they got, over their shares, differs by no more than one
    request of each (Goyal et al., theorem 1), and here by the bursts besides."""
    one, other, shares = Tenant("one", share), Tenant("other"), FairShare()
    waiting = []
    for tenant, sizes in ((one, first), (other, second)):
        waiting += [
            (shares.enter((tenant.name, number), tenant, size), len(waiting), tenant, size)
            for number, size in enumerate(sizes)
        ]
    served = {one: 0.0, other: 0.0}
    left = {one: len(first), other: len(second)}
    for _, _, tenant, size in sorted(waiting, key=lambda entry: entry[:2]):
        served[tenant] += size / tenant.share
        left[tenant] -= 1
        if not all(left.values()):
            break
        bursts = BURST_TOKENS / one.share + BURST_TOKENS
        assert abs(served[one] - served[other]) <= 4000 / one.share + 4000 + bursts


def test_turns_fit_between_priorities() -> None:
    assert turn_of(0) == 0
    assert turn_of(TURN_TOKENS * 2.5) == 2
    assert turn_of(1e30) == MAX_TURN
    late = EngineRequest("late", (1,), SamplingParams(max_tokens=1), priority=3, turn=MAX_TURN)
    assert engine_priority(3) <= late.engine_priority < engine_priority(4)
    assert -(2**63) <= engine_priority(-(2**31)) < engine_priority(2**31 - 1, MAX_TURN) < 2**63


@dataclass
class Here:
    tenant: Tenant
    start: float


class FairShareMachine(RuleBasedStateMachine):
    """Requests come, begin, take tokens and leave in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = FairShare()
        self.here: dict[int, Here] = {}
        self.latest_start = 0.0
        self.count = 0

    @rule(name=st.sampled_from("abc"), share=st.sampled_from((0.5, 1.0, 4.0)), tokens=st.integers(0, 100_000))
    def enter(self, name: str, share: float, tokens: int) -> None:
        start = self.shares.enter(self.count, Tenant(name, share), tokens)
        assert start >= self.latest_start, "nobody goes before what is being served"
        self.here[self.count] = Here(Tenant(name, share), start)
        self.count += 1

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        if self.here:
            number = data.draw(st.sampled_from(sorted(self.here)))
            self.shares.begin(number)
            self.latest_start = max(self.latest_start, self.here[number].start)

    @rule(data=st.data(), tokens=st.integers(-4000, 4000))
    def charge(self, data: st.DataObject, tokens: int) -> None:
        if self.here:
            self.shares.charge(data.draw(st.sampled_from(sorted(self.here))), tokens)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.here:
            number = data.draw(st.sampled_from(sorted(self.here)))
            self.shares.leave(number)
            del self.here[number]
            if not self.here:
                self.latest_start = 0.0

    @invariant()
    def holds(self) -> None:
        self.shares.validate()
        assert len(self.shares) == len(self.here)


TestFairShareMachine = FairShareMachine.TestCase
