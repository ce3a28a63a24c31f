"""The likeliest answers, as trying all of them finds them."""

import math
from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.requests.beam_search import Beam, BeamSearch

END = 0
Model = Callable[[tuple[int, ...]], list[tuple[int, float]]]


def model_of(seed: int, tokens: int) -> Model:
    """The logprobs of every token behind others."""

    def model(before: tuple[int, ...]) -> list[tuple[int, float]]:
        weights = [1 + hash((seed, before, token)) % 97 for token in range(tokens)]
        return [(token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]

    return model


def search(model: Model, width: int, max_tokens: int, penalty: float = 1.0, ends: bool = True) -> list[Beam]:
    beams = BeamSearch(3, width, max_tokens, frozenset({END} if ends else ()), penalty)
    steps = 0
    while not beams.is_done:
        beams.take([model(beam.token_ids) for beam in beams.beams])
        steps += 1
    assert steps <= max_tokens
    return beams.best()


def all_answers(model: Model, tokens: int, max_tokens: int) -> list[tuple[int, ...]]:
    whole = list(product(range(1, tokens), repeat=max_tokens))
    ended = [(*each, END) for n in range(max_tokens) for each in product(range(1, tokens), repeat=n)]
    return whole + ended


def logprob(model: Model, answer: tuple[int, ...]) -> float:
    return sum(dict(model(answer[:at]))[token] for at, token in enumerate(answer))


@given(seed=st.integers(0, 10_000), penalty=st.sampled_from((0.0, 1.0, 2.0)))
def test_beams_that_are_wide_enough_find_the_best_of_all(seed: int, penalty: float) -> None:
    model = model_of(seed, 3)
    found = search(model, 40, 4, penalty)

    def score(answer: tuple[int, ...]) -> float:
        return logprob(model, answer) / (3 + len(answer) - (answer[-1] == END)) ** penalty

    best = max(score(answer) for answer in all_answers(model, 3, 4))
    assert score(found[0].token_ids) == pytest.approx(best)
    assert [beam.logprob for beam in found] == pytest.approx([logprob(model, beam.token_ids) for beam in found])


@given(seed=st.integers(0, 10_000), width=st.integers(1, 5))
def test_as_many_answers_as_beams_and_none_twice(seed: int, width: int) -> None:
    found = search(model_of(seed, 6), width, 5)
    assert len({beam.token_ids for beam in found}) == len(found) == width
    assert all(beam.is_ended == (beam.token_ids[-1] == END) for beam in found)
    assert all(END not in beam.token_ids[:-1] for beam in found)


def test_one_beam_is_greedy() -> None:
    model = model_of(7, 9)
    (found,) = search(model, 1, 6, ends=False)
    said: tuple[int, ...] = ()
    for _ in range(6):
        said += (max(model(said), key=lambda follower: follower[1])[0],)
    assert found.token_ids == said


def test_a_search_ends_early_where_all_beams_have_ended() -> None:
    beams = BeamSearch(1, 2, 100, frozenset({END}))
    beams.take([[(END, -0.1)]])
    assert beams.is_done
    assert beams.best() == [Beam((END,), -0.1, True, ([(END, -0.1)],))]
