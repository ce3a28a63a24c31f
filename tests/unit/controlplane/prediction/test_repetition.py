"""Cycles at the end of answers."""

from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.repetition import LONGEST_PERIOD_TOKENS, WINDOW_TOKENS, repetition

ANSWERS = st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=1, max_size=4)


def naive(answer: list[int]) -> tuple[int, int]:
    """Period and repeated tokens, by the definition."""
    newest = answer[-WINDOW_TOKENS:]
    best = (0, 0)
    for period in range(1, LONGEST_PERIOD_TOKENS + 1):
        run = 0
        while run + period < len(newest) and newest[-1 - run] == newest[-1 - run - period]:
            run += 1
        if run >= period and run + period > sum(best):
            best = (period, run)
    return best


@given(ANSWERS)
def test_all_at_once_is_each_by_itself(answers: list[list[int]]) -> None:
    found = repetition(answers)
    for row, answer in enumerate(answers):
        assert (int(found.period_tokens[row]), int(found.repeated_tokens[row])) == naive(answer)
        assert found.distinct_share[row] == (len(set(answer)) / len(answer) if answer else 0) or answer
    assert found.features().shape == (len(answers), 3)


def test_a_cycle_is_found_with_its_length_and_how_often_it_came() -> None:
    cycle = [7, 8, 9, 7, 5]
    found = repetition([list(range(100, 130)) + cycle * 6, list(range(40)), []])
    assert found.period_tokens.tolist() == [5, 0, 0]
    assert found.repeated_tokens.tolist() == [25, 0, 0]
    assert found.distinct_share[1] == 1.0
    assert abs(float(found.distinct_share[0]) - 34 / 60) < 1e-6


def test_only_the_newest_tokens_count() -> None:
    found = repetition([[1] * 1000 + list(range(WINDOW_TOKENS)), [3] * 5000])
    assert found.period_tokens.tolist() == [0, 1]
    assert found.repeated_tokens.tolist() == [0, WINDOW_TOKENS - 1]
