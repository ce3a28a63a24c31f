"""What a tier is expected to take."""

from itertools import pairwise
from statistics import median_low

from hypothesis import given
from hypothesis import strategies as st

from controlplane.protocols.cascade.expected_time import DOUBT_AFTER_S, MAX_AGE_S, REMEMBERED, ExpectedTime

seconds = st.floats(0.001, 1000)
some = st.lists(seconds, min_size=1, max_size=REMEMBERED)


def after(*took: float, cut: tuple[float, ...] = (), at_s: float = 0.0) -> ExpectedTime:
    time = ExpectedTime()
    for each in took:
        time.took(each, at_s)
    for each in cut:
        time.took_at_least(each, at_s)
    return time


def test_what_is_not_known_is_expected_to_take_no_time() -> None:
    assert ExpectedTime().expected_s(0.0) == 0.0
    assert after().median_s(1e9) == 0.0


@given(some)
def test_of_whole_answers_it_is_the_median(took: list[float]) -> None:
    assert after(*took).expected_s(0.0) == median_low(took)


@given(st.lists(seconds, min_size=REMEMBERED, max_size=40))
def test_the_latest_count(took: list[float]) -> None:
    assert after(*took).expected_s(0.0) == median_low(took[-REMEMBERED:])


def test_one_slow_answer_among_quick_ones_changes_nothing() -> None:
    assert after(60.0, 2.0).expected_s(0.0) == 2.0
    assert after(2.0, 2.1, 60.0).expected_s(0.0) == 2.1


@given(st.lists(seconds, max_size=8), st.lists(seconds, max_size=8), seconds)
def test_what_was_cut_never_makes_it_shorter(took: list[float], cut: list[float], another: float) -> None:
    time = after(*took, cut=tuple(cut))
    before_s = time.median_s(0.0)
    time.took_at_least(another, 0.0)
    assert time.median_s(0.0) >= before_s


@given(st.lists(seconds, max_size=REMEMBERED), seconds)
def test_answers_that_were_given_up_do_not_make_a_whole_one_look_short(given_up: list[float], whole_s: float) -> None:
    time = after(cut=tuple(each for each in given_up[:-1] if each < whole_s))
    time.took(whole_s, 0.0)
    assert time.expected_s(0.0) == whole_s


def test_what_was_cut_took_at_least_so_long() -> None:
    assert after(cut=(9.5,)).expected_s(0.0) == 9.5
    assert after(2.0, 2.0, cut=(9.5,)).expected_s(0.0) == 2.0
    assert after(2.0, 2.0, cut=(9.5, 9.6, 9.7)).expected_s(0.0) == 9.7, "most took longer than is known"
    assert after(60.0, cut=(9.5,) * REMEMBERED).expected_s(0.0) == 60.0, "they may all have taken that"


def test_what_nothing_is_begun_of_is_doubted_the_sooner_the_less_is_known() -> None:
    once, often = after(60.0), after(*[60.0] * 4)
    for time, doubted_s in ((once, DOUBT_AFTER_S), (often, 4 * DOUBT_AFTER_S)):
        assert time.expected_s(doubted_s - 0.1) == 60.0
        assert time.expected_s(doubted_s) == 0.0
        time.begins(doubted_s)
        assert time.expected_s(doubted_s) == 60.0, "one at a time"
        time.took_at_least(10.0, doubted_s + 10.0)
        assert time.expected_s(doubted_s + 10.0) == 60.0, "which was to be expected"
        time.took(2.0, doubted_s + 11.0)
        assert time.median_s(doubted_s + 11.0) == (2.0 if time is once else 60.0)


@given(some, st.floats(0, 1000))
def test_it_is_forgotten_in_the_end(took: list[float], at_s: float) -> None:
    time = after(*took, at_s=at_s)
    time.begins(at_s + MAX_AGE_S + 1)
    assert time.expected_s(at_s + MAX_AGE_S + 1) == 0.0


@given(st.lists(seconds, min_size=1, max_size=40), st.floats(0.1, 600))
def test_no_tier_is_locked_out_for_longer_than_it_is_remembered(took: list[float], wanted_s: float) -> None:
    """Asked once a second whenever it is expected to be in time; it takes 0.1 s now."""
    time, begun_at_s = after(*took), [0.0]
    for now_s in range(1, 400):
        if time.expected_s(now_s) <= wanted_s:
            begun_at_s.append(float(now_s))
            time.begins(now_s)
            time.took(0.1, now_s)
    assert max(later - before for before, later in pairwise(begun_at_s)) <= MAX_AGE_S + 1
    assert begun_at_s[-1] == 399


def test_what_took_as_long_as_was_expected_before_it_was_cut_is_not_counted() -> None:
    time = after(2.0, cut=(2.0,))
    assert time.expected_s(DOUBT_AFTER_S - 0.1) == 2.0
    assert time.expected_s(DOUBT_AFTER_S) == 0.0, "one time is known, not two"


def test_it_is_remembered_for_so_long_and_no_longer() -> None:
    time = after(2.0, at_s=1000.0)
    assert time.median_s(1000.0 + MAX_AGE_S) == 2.0
    assert time.median_s(1000.1 + MAX_AGE_S) == 0.0
