"""The prefix index against a naive model of it: for each instance a set of blocks."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from controlplane.model.block_table import BlockTable
from controlplane.model.prefix_index import PrefixIndex
from mesh.errors import IllegalTransition
from simulator.cluster.block_dict import BlockDict
from tests.examples import examples

SMALL_HASHES = list(range(12))
"""All in bucket 0, and 0 is the key of an unused place: they overflow the bucket."""
HASHES = SMALL_HASHES + [number << 58 | 7 for number in range(1, 40)]
BLOCKS = st.lists(st.sampled_from(HASHES), max_size=20)


def together(max_blocks: int) -> BlockTable:
    """One that rewrites any number of blocks as a batch."""
    return BlockTable(max_blocks, batch_blocks=1)


def leading_blocks(held: set[int], chain: list[int]) -> int:
    for depth, block in enumerate(chain):
        if block not in held:
            return depth
    return len(chain)


class PrefixIndexMachine(RuleBasedStateMachine):
    """Random stores, removals, deaths, slices of sweeping and slot reuse; lookups must agree with the sets, whichever
    table is behind them."""

    @initialize(max_blocks=st.sampled_from([5, 30, 1000]), table=st.sampled_from([BlockTable, together, BlockDict]))
    def start(self, max_blocks: int, table: Callable[[int], BlockTable | BlockDict]) -> None:
        self.index = PrefixIndex(max_blocks, table(max_blocks))
        self.held: dict[int, set[int]] = {}
        self.unswept: dict[int, set[int]] = {}

    @rule()
    def add(self) -> None:
        slot = self.index.add_instance()
        assert slot not in self.held
        assert slot not in self.unswept
        self.held[slot] = set()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), blocks=BLOCKS)
    def store(self, data: st.DataObject, blocks: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        refused = 0
        for block in blocks:
            known = set().union(*self.held.values(), *self.unswept.values())
            if block in known or len(known) < self.index.max_blocks:
                self.held[slot].add(block)
            else:
                refused += 1
        before = len(self.index)
        assert self.index.store(slot, blocks) == refused
        assert before <= len(self.index) <= self.index.max_blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data(), blocks=BLOCKS)
    def remove(self, data: st.DataObject, blocks: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.index.remove(slot, blocks)
        self.held[slot] -= set(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.index.retire(slot)
        blocks = self.held.pop(slot)
        if blocks:
            self.unswept[slot] = blocks

    @rule()
    def sweep_all(self) -> None:
        while self.index.sweep(1_000_000):
            pass
        self.unswept.clear()

    @invariant()
    def lookups_agree(self) -> None:
        among = sum(1 << slot for slot in self.held)
        for chain in (HASHES, SMALL_HASHES, HASHES[12:20], HASHES[5:25]):
            counts = self.index.lookup(chain, among)
            for slot, held in self.held.items():
                assert counts[slot] == leading_blocks(held, chain)

    @invariant()
    def sizes_agree(self) -> None:
        self.index.validate()
        assert {slot: self.index.held_blocks(slot) for slot in self.held} == {
            slot: len(held) for slot, held in self.held.items()
        }
        assert len(self.index) == len(set().union(*self.held.values(), *self.unswept.values()))


PrefixIndexMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestPrefixIndex = PrefixIndexMachine.TestCase


@settings(deadline=None, max_examples=examples(50))
@given(st.data())
def test_lookup_among_many_instances(data: st.DataObject) -> None:
    """More instances than bits of a word, random subsets of a random chain, or a few prefixes of it that many have."""
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chain = random.integers(0, 2**64, 60, np.uint64).tolist()
    index = PrefixIndex(1000)
    held = []
    prefixes = data.draw(st.none() | st.lists(st.integers(0, 60), min_size=1, max_size=9))
    for _ in range(130):
        slot = index.add_instance()
        blocks = set(random.permutation(len(chain))[: random.integers(len(chain) + 1)].tolist())
        blocks |= set(range(random.integers(len(chain) + 1)))
        if prefixes is not None:
            blocks = set(range(random.choice(prefixes)))
        held.append({chain[block] for block in blocks})
        index.store(slot, held[slot])
    counts = index.lookup(chain, (1 << 130) - 1)
    assert counts.tolist() == [leading_blocks(blocks, chain) for blocks in held]


def test_sweep_in_slices_clears_the_dead_and_frees_their_slot() -> None:
    index = PrefixIndex(4000)
    dead, alive = index.add_instance(), index.add_instance()
    chain = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64).tolist()
    index.store(dead, chain)
    index.store(alive, chain[:500])
    index.retire(dead)
    slices = 1
    while index.sweep(256):
        slices += 1
    assert slices == index._table.places / 256
    assert len(index) == 500
    assert index.lookup(chain, 1 << alive)[alive] == 500
    assert index.add_instance() == dead
    assert index.lookup(chain, 1 << dead)[dead] == 0


def test_a_slot_is_not_reused_before_the_sweep_has_passed() -> None:
    index = PrefixIndex(100)
    first = index.add_instance()
    index.store(first, [1, 2])
    index.retire(first)
    index.sweep(8)
    assert index.add_instance() != first


def test_a_slot_that_held_nothing_is_free_at_once() -> None:
    index = PrefixIndex(100)
    index.retire(index.add_instance())
    assert index.add_instance() == 0
    assert not index.sweep(10)


def test_full_index_refuses_new_blocks_and_keeps_the_old() -> None:
    index = PrefixIndex(3)
    slot, other = index.add_instance(), index.add_instance()
    assert index.store(slot, [10, 20, 30, 40, 50]) == 2
    assert index.refused_blocks_total == 2
    assert index.store(other, [10, 20]) == 0
    assert index.lookup([10, 20, 30, 40], 0b11).tolist() == [3, 2]


def test_updates_of_a_retired_slot_tell_what_was_wrong() -> None:
    index = PrefixIndex(3)
    index.retire(index.add_instance())
    with pytest.raises(IllegalTransition, match="slot 0 is not in use"):
        index.store(0, [1])


def test_empty_chain_and_empty_index() -> None:
    index = PrefixIndex(3)
    index.add_instance()
    assert index.lookup([], 1).tolist() == [0]
    assert index.lookup([5, 6], 1).tolist() == [0]


@given(
    st.lists(st.tuples(st.sampled_from([3, 4, 5, 6]), st.lists(st.sampled_from(HASHES), unique=True)), max_size=12),
    st.sampled_from([5, 30, 1000]),
)
@settings(max_examples=examples(200))
def test_a_batch_does_what_its_blocks_do_one_by_one(steps: list[tuple[int, list[int]]], max_blocks: int) -> None:
    """Values 1 and 2 come and go: 3 and 4 store them, 5 changes one into the other, 6 removes both."""
    after_of = {3: {0: 1, 1: 1, 2: 2}, 4: {0: 2, 1: 1, 2: 2}, 5: {0: 0, 1: 2, 2: 1}, 6: {0: 0, 1: 0, 2: 0}}
    batched, single = together(max_blocks), BlockTable(max_blocks, batch_blocks=10**9)
    for step, blocks in steps:
        assert batched.rewrite(blocks, after_of[step]) == single.rewrite(blocks, after_of[step])
        assert [batched.get(block) for block in HASHES] == [single.get(block) for block in HASHES]
        assert batched.blocks_by_value() == single.blocks_by_value()
        batched.validate()
