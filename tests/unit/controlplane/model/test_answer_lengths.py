"""The usual length of answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.answer_lengths import FIRST_GUESS_TOKENS, REMEMBERED_ANSWERS, AnswerLengths


def test_it_begins_with_a_guess_and_ends_with_the_mean() -> None:
    lengths = AnswerLengths()
    assert lengths.mean_tokens(0) == FIRST_GUESS_TOKENS
    for _ in range(100):
        lengths.add(tokens=1000, ended=10)
    assert lengths.mean_tokens(4) == pytest.approx(100, rel=0.02)


def test_a_change_is_followed() -> None:
    lengths = AnswerLengths()
    lengths.add(tokens=10**9, ended=10**6)
    lengths.add(tokens=5000 * 100, ended=5000)
    assert lengths.mean_tokens(0) == pytest.approx(100 + 900 * 2048 / 7048, rel=0.05)


def test_the_first_minute_hears_of_those_that_have_not_ended() -> None:
    lengths = AnswerLengths()
    lengths.add(tokens=100_000, ended=0)
    assert FIRST_GUESS_TOKENS < lengths.mean_tokens(200) < 100_000 / 8


@given(st.lists(st.tuples(st.integers(-10, 10**7), st.integers(-10, 10**5))), st.integers(0, 10**6))
def test_it_is_always_a_length(added: list[tuple[int, int]], running: int) -> None:
    lengths = AnswerLengths()
    for tokens, ended in added:
        lengths.add(tokens, ended)
        lengths.validate()
    assert 0 < lengths.mean_tokens(running) < 10**9
    assert lengths._ended <= REMEMBERED_ANSWERS
