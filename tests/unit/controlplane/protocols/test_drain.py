"""Where the requests of a drained instance go, and when."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.migration.drain import (
    LONGEST_PAUSE_MS,
    MOVES_A_PASS,
    PAUSE_MS,
    AskLoads,
    Drain,
    Drained,
    LoadsKnown,
    LookAfter,
    Looked,
    Move,
    MoveEnded,
    assign,
)

TARGETS = ("a", "b", "c")
NOBODY: frozenset[str] = frozenset()


def test_the_least_loaded_is_filled_first() -> None:
    plan = assign(["1", "2", "3", "4"], {"a": 3, "b": 0, "c": 1}, {})
    assert plan == {"1": "b", "2": "b", "3": "c", "4": "b"}


def test_one_that_refused_is_asked_again_only_when_all_have() -> None:
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("a")}) == {"1": "b"}
    assert assign(["1"], {"a": 0, "b": 5}, {"1": frozenset("ab")}) == {"1": "a"}


@given(
    loads=st.dictionaries(st.sampled_from(TARGETS), st.integers(0, 20), min_size=1),
    refused=st.dictionaries(st.sampled_from("12345"), st.frozensets(st.sampled_from(TARGETS))),
)
def test_every_request_gets_a_target_that_may_take_it(
    loads: dict[str, int], refused: dict[str, frozenset[str]]
) -> None:
    plan = assign("12345", loads, refused)
    assert set(plan) == set("12345")
    for request_id, target in plan.items():
        unwilling = refused.get(request_id, frozenset())
        assert target not in unwilling or unwilling >= set(loads)


def test_all_move_and_the_drain_is_over() -> None:
    drain = Drain()
    assert drain.handle(Looked(("r", "s"), NOBODY)) == (AskLoads(),)
    assert drain.handle(LoadsKnown({"a": 1, "b": 0})) == (Move("r", "b"), Move("s", "a"))
    assert drain.handle(MoveEnded("r", moved=True)) == ()
    assert drain.handle(MoveEnded("s", moved=True)) == (LookAfter(0.0),)
    assert drain.handle(Looked((), NOBODY)) == (Drained(2),)


def test_a_request_that_is_refused_is_moved_elsewhere_after_a_pause() -> None:
    drain = Drain()
    drain.handle(Looked(("r", "s"), NOBODY))
    drain.handle(LoadsKnown({"a": 0, "b": 9}))
    drain.handle(MoveEnded("r", moved=False))
    assert drain.handle(MoveEnded("s", moved=True)) == (LookAfter(PAUSE_MS),)
    drain.handle(Looked(("r",), NOBODY))
    assert drain.handle(LoadsKnown({"a": 0, "b": 9})) == (Move("r", "b"),)


def test_pauses_double_up_to_a_bound_while_nothing_moves_and_are_short_again_once_something_does() -> None:
    drain, pauses = Drain(), []
    for _ in range(8):
        drain.handle(Looked(("r",), NOBODY))
        drain.handle(LoadsKnown({"a": 0}))
        (instruction,) = drain.handle(MoveEnded("r", moved=False))
        assert isinstance(instruction, LookAfter)
        pauses.append(instruction.delay_ms)
        drain.validate()
    assert pauses[:5] == [PAUSE_MS, 2 * PAUSE_MS, 4 * PAUSE_MS, 8 * PAUSE_MS, 16 * PAUSE_MS]
    assert pauses[-1] == LONGEST_PAUSE_MS
    drain.handle(Looked(("r", "s"), NOBODY))
    drain.handle(LoadsKnown({"a": 0}))
    drain.handle(MoveEnded("r", moved=False))
    assert drain.handle(MoveEnded("s", moved=True)) == (LookAfter(LONGEST_PAUSE_MS),)
    drain.handle(Looked(("r",), NOBODY))
    assert drain.handle(LoadsKnown({})) == (LookAfter(PAUSE_MS),)


def test_one_move_in_a_pass_is_enough_for_a_short_pause() -> None:
    drain = Drain()
    drain.handle(Looked(("r", "s"), frozenset(("r", "s"))))
    drain.handle(Looked(("r", "s"), NOBODY))
    drain.handle(LoadsKnown({"a": 0}))
    drain.handle(MoveEnded("r", moved=True))
    assert drain.handle(MoveEnded("s", moved=False)) == (LookAfter(2 * PAUSE_MS),)
    drain.handle(Looked(("s",), NOBODY))
    assert drain.handle(LoadsKnown({})) == (LookAfter(PAUSE_MS),)


def test_what_others_have_ordered_is_looked_at_again() -> None:
    drain = Drain()
    assert drain.handle(Looked(("r",), frozenset("r"))) == (LookAfter(PAUSE_MS),)
    assert drain.handle(Looked(("r", "s"), frozenset("r"))) == (AskLoads(),)
    assert drain.handle(LoadsKnown({"a": 0})) == (Move("s", "a"),)


def test_a_drain_goes_on_until_another_instance_is_there() -> None:
    drain = Drain()
    for _ in range(20):
        assert drain.handle(Looked(("r",), NOBODY)) == (AskLoads(),)
        (instruction,) = drain.handle(LoadsKnown({}))
        assert isinstance(instruction, LookAfter)
    drain.handle(Looked(("r",), NOBODY))
    assert drain.handle(LoadsKnown({"b": 0})) == (Move("r", "b"),)


def test_no_more_than_so_many_move_at_once() -> None:
    drain, running = Drain(), tuple(map(str, range(MOVES_A_PASS + 5)))
    drain.handle(Looked(running, NOBODY))
    assert len(drain.handle(LoadsKnown({"a": 0}))) == MOVES_A_PASS
    drain.validate()


@given(moves=st.lists(st.booleans(), max_size=60), requests=st.integers(0, 70))
def test_every_drain_ends_with_all_moved(moves: list[bool], requests: int) -> None:
    drain, here = Drain(), [f"r{number}" for number in range(requests)]
    fate = itertools.chain(moves, itertools.repeat(True))
    instructions = drain.handle(Looked(tuple(here), NOBODY))
    for _ in range(1000):
        drain.validate()
        if instructions == (Drained(requests),):
            return
        (instruction,) = instructions
        if isinstance(instruction, LookAfter):
            instructions = drain.handle(Looked(tuple(here), NOBODY))
            continue
        for move in drain.handle(LoadsKnown({"a": 1, "b": 0})):
            assert isinstance(move, Move)
            moved = next(fate)
            if moved:
                here.remove(move.request_id)
            instructions = drain.handle(MoveEnded(move.request_id, moved))
    raise AssertionError("it goes on for ever")
