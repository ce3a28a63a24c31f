"""Blocks to come: of prompts that were placed and are not computed yet."""

from collections import defaultdict

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from controlplane.model.cluster import ClusterTable
from controlplane.model.cluster_limits import ClusterLimits
from controlplane.model.expected_blocks import ExpectedBlocks, mark_spacing, marks_of
from controlplane.model.shared_event import SharedEvent, SharedKind
from controlplane.policies.place import place
from controlplane.policies.registry import create_policy
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest
from tests.examples import examples
from tests.unit.controlplane.builders import BLOCK_TOKENS, cache, cached_tokens, cluster, instance, report, request

CHAIN = tuple(range(100, 132))
"""Of 512 tokens: four marks."""
MARKS = marks_of(CHAIN, BLOCK_TOKENS)
TOKENS = st.lists(st.integers(0, 2), max_size=9)


def cached(table: ClusterTable, *blocks: int) -> list[int]:
    """Blocks that each instance counts as having."""
    snapshot = table.snapshot("m")
    assert snapshot is not None
    return [int(tokens) // BLOCK_TOKENS for tokens in cached_tokens(table, snapshot, blocks)]


def placed(table: ClusterTable, request_id: str = "r", where: str = "a", now_s: float = 0.0) -> None:
    table.placed(request_id, where, 512, now_s, MARKS, computed_ms=250.0)


def computed_s(table: ClusterTable) -> dict[str, float]:
    """By when what each instance is to have of `CHAIN` is thought to be computed."""
    leading = table.expected.leading(CHAIN, mark_spacing(BLOCK_TOKENS))
    return {where: by_s for where, (_, by_s) in leading.items()}


def test_a_placed_prompt_counts_as_cached_until_it_is() -> None:
    table = cluster("a", "b")
    placed(table)
    assert cached(table, *CHAIN) == [32, 0]
    assert cached(table, *CHAIN[:20], 99, 98, 97, 96) == [16, 0], "as far as it is the same prompt, in whole marks"
    assert cached(table, 99, *CHAIN) == [0, 0]
    cache(table, "a", *CHAIN[:11])
    assert cached(table, *CHAIN) == [32, 0], "the first chunk is computed"
    cache(table, "a", *CHAIN[11:])
    assert len(table.expected) == 0, "the index knows it all"
    assert cached(table, *CHAIN) == [32, 0]


def test_what_is_cached_counts_where_more_is_to_come() -> None:
    table = cluster("a", "b")
    cache(table, "b", *CHAIN[:9])
    placed(table)
    assert cached(table, *CHAIN) == [32, 9]


def test_what_is_cached_of_a_prompt_needs_no_marks() -> None:
    assert marks_of(CHAIN, BLOCK_TOKENS) == (107, 115, 123, 131)
    assert marks_of(CHAIN, BLOCK_TOKENS, cached_tokens=128) == (115, 123, 131)
    assert marks_of(CHAIN, BLOCK_TOKENS, cached_tokens=127) == (107, 115, 123, 131)
    assert marks_of(CHAIN[:7], BLOCK_TOKENS) == ()
    assert marks_of(CHAIN[:19], BLOCK_TOKENS, cached_tokens=128) == (115, 118), "and the last block"
    assert marks_of(CHAIN[:19], BLOCK_TOKENS, cached_tokens=287) == (118,)
    assert marks_of(CHAIN[:19], BLOCK_TOKENS, cached_tokens=304) == ()
    assert marks_of((1, 2, 3), 512, cached_tokens=512) == (2, 3), "long blocks are marks, each"


def test_who_has_a_prefix_to_come_and_goes_on_from_it_has_both() -> None:
    table = cluster("a", "b")
    table.placed("prefix", "a", 256, 0.0, MARKS[:2])
    table.placed("longer", "b", 512, 0.0, MARKS)
    assert cached(table, *CHAIN) == [16, 32]
    table.expected.forget("prefix")
    assert cached(table, *CHAIN) == [0, 0], "nobody is known to begin this chain"


def test_who_goes_on_from_a_whole_prompt_finds_all_of_it() -> None:
    """As the next turn of a conversation does, which may come before the one before it is computed."""
    table = cluster("a", "b")
    cache(table, "b", *CHAIN[:16])
    table.placed("turn", "a", 304, 0.0, marks_of(CHAIN[:19], BLOCK_TOKENS))
    assert cached(table, *CHAIN) == [19, 16]
    assert cached(table, *CHAIN[:18]) == [0, 16], "not in whole marks: nobody is to have more than what is cached"
    table.placed("next", "b", 352, 1.0, marks_of(CHAIN[:22], BLOCK_TOKENS, cached_tokens=256))
    assert cached(table, *CHAIN) == [19, 22]
    cache(table, "a", *CHAIN[:19])
    assert cached(table, *CHAIN) == [19, 22], "what is held and what is to come"


def test_a_placement_that_fails_brings_nothing() -> None:
    table = cluster("a", "b")
    placed(table)
    table.ended("r")
    assert cached(table, *CHAIN) == [32, 0], "it may have been computed, and the report is on its way"
    report(table, "b")
    report(table, "a")
    assert cached(table, *CHAIN) == [0, 0]


def test_a_request_that_is_placed_again_brings_its_blocks_there() -> None:
    table = cluster("a", "b")
    placed(table)
    placed(table, where="b")
    assert cached(table, *CHAIN) == [0, 32]
    table.lost("b", "1")
    assert len(table.expected) == 0


def test_what_never_comes_expires() -> None:
    table = cluster("a")
    placed(table, now_s=1.0)
    table.forget_unreported(1.0 + table.limits.expected_s)
    assert cached(table, *CHAIN) == [32]
    table.forget_unreported(1.1 + table.limits.expected_s)
    assert cached(table, *CHAIN) == [0]


def test_other_schedulers_hear_of_it() -> None:
    table = cluster("a", "b")
    table.shared(SharedEvent(SharedKind.PREFILL, "r", "b", 512, "other", MARKS, computed_ms=250.0), 2.0)
    assert cached(table, *CHAIN) == [0, 32]
    assert computed_s(table) == {"b": 2.25}
    table.shared(SharedEvent(SharedKind.ENDED, "r", "b", origin="other"), 0.0)
    report(table, "b")
    assert cached(table, *CHAIN) == [0, 0]


def test_a_new_watch_goes_on_with_what_is_expected() -> None:
    former = cluster("a", "b")
    placed(former)
    placed(former, "s", "b")
    table = ClusterTable(ClusterLimits(max_indexed_blocks=10))
    table.joined(instance("a"))
    report(table, "a")
    table.take_over(former)
    assert cached(table, *CHAIN) == [32]
    assert computed_s(table) == {"a": 0.25}
    former.unmonitor("a", "1")
    other = ClusterTable(ClusterLimits(max_indexed_blocks=10))
    other.adopt(former, "a")
    assert cached(other, *CHAIN) == [32]
    assert computed_s(other) == {"a": 0.25}


def test_memory_is_bounded() -> None:
    expected = ExpectedBlocks(max_marks=10)
    for number in range(20):
        expected.add(f"r{number}", "a", [10 * number + block for block in range(4)], float(number), number + 0.5)
        expected.validate()
    assert len(expected) == 8
    assert expected.leading((190, 191), 1) == {"a": (2, 19.5)}
    expected.add("long", "a", range(1000, 1011), 20.0, 20.0)
    assert not expected.leading((1000, 1001), 1)


def test_the_siblings_of_a_fan_out_are_placed_with_the_first() -> None:
    """Nobody has reported anything in between."""
    table, rule = cluster("a", "b", "c"), create_policy("simulation")
    blocks = tuple(range(100, 300))
    chosen = {
        place(table, rule, request(f"r{number}", 3200 + number, (*blocks, 1000 + number), now_s=number / 100)).instance
        for number in range(4)
    }
    assert len(chosen) == 1


def test_a_fan_out_hits_the_cache_in_the_simulated_mesh() -> None:
    """Eight siblings 15 ms apart, reports each 50 ms: a fresh prefix of 8192 tokens is computed by a few."""
    requests = [
        TraceRequest(0.7 * group + 0.015 * sibling, 8192 + 64, 32, tuple(range(1000 * group, 1000 * group + 16)), 512)
        for group in range(12)
        for sibling in range(8)
    ]
    requests.sort(key=lambda request: request.arrival_s)
    config = ClusterConfig(8, InstanceConfig(kv_blocks=8192, max_model_len_tokens=16_384))
    outcomes = ClusterSimulation(requests, config, LinearCost(), create_policy("penstock")).run()
    hits = sum(each.cached_tokens for each in outcomes) / sum(each.input_tokens for each in outcomes)
    assert hits > 0.3, "0.02 without what is expected"


class Expectations(RuleBasedStateMachine):
    """Chains over three tokens, so that prompts share prefixes; the model keeps every placed chain as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = ExpectedBlocks(max_marks=1000)
        self.open: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.now_s = 0.0

    @initialize(block_tokens=st.sampled_from((128, 64, 32)))
    def choose(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    @staticmethod
    def chain(tokens: list[int]) -> tuple[int, ...]:
        return tuple(hash((7, *tokens[: end + 1])) & 0xFFFFFFFF for end in range(len(tokens)))

    @rule(number=st.integers(0, 5), where=st.sampled_from("ab"), tokens=TOKENS)
    def place(self, number: int, where: str, tokens: list[int]) -> None:
        self.now_s += 1
        marks = marks_of(self.chain(tokens), self.block_tokens)
        self.expected.add(f"r{number}", where, marks, self.now_s, self.now_s)
        self.open[f"r{number}"] = (where, self.chain(tokens))

    @rule(number=st.integers(0, 5), where=st.sampled_from("ab"))
    def end(self, number: int, where: str) -> None:
        self.expected.ended(f"r{number}")
        self.expected.reported(where)
        if self.open.get(f"r{number}", ("",))[0] == where:
            del self.open[f"r{number}"]

    @rule(where=st.sampled_from("ab"))
    def lose(self, where: str) -> None:
        self.expected.lost(where)
        self.open = {name: each for name, each in self.open.items() if each[0] != where}

    @rule(tokens=TOKENS, held_blocks=st.integers(0, 4))
    def ask(self, tokens: list[int], held_blocks: int) -> None:
        """It never promises more of a chain than an instance shares with a prompt that is to be computed there."""
        chain, spacing = self.chain(tokens), mark_spacing(self.block_tokens)
        most: dict[str, int] = defaultdict(int)
        for where, placed_chain in self.open.values():
            shared = 0
            while shared < min(len(chain), len(placed_chain)) and chain[shared] == placed_chain[shared]:
                shared += 1
            most[where] = max(most[where], shared)
        leading = self.expected.leading(chain, spacing, held_blocks)
        assert all(blocks <= most[where] for where, (blocks, _) in leading.items())
        if len(self.open) == 1 and max(most.values()) > held_blocks:
            ((where, placed_chain),) = self.open.values()
            is_whole = most[where] == len(placed_chain) >= spacing
            assert leading.get(where, (0, 0.0))[0] >= (most[where] if is_whole else most[where] // spacing * spacing)

    @invariant()
    def state_holds(self) -> None:
        self.expected.validate()


TestExpectations = Expectations.TestCase
TestExpectations.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)
