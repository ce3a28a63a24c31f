"""Splits by request, features and baselines of length prediction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.prediction.length_baselines import Constant, GeneratedOnly, PromptOnly
from controlplane.prediction.length_features import INPUTS, Inputs, features, input_width
from controlplane.prediction.length_samples import LengthSamples, joined, split_of


def samples(prompt: list[int], generated: list[int], remaining: list[int], requests: list[int]) -> LengthSamples:
    columns = (np.array(column, np.int32) for column in (prompt, generated, remaining, requests))
    return LengthSamples(np.zeros((len(prompt), 2), np.float32), *columns)


@given(st.lists(st.integers(0, 1000), max_size=20), st.integers(0, 5))
def test_equal_prompts_fall_into_one_split(prompt: list[int], seed: int) -> None:
    assert split_of(prompt, seed) == split_of(tuple(prompt), seed)


def test_splits_are_70_15_15() -> None:
    drawn = [split_of((number, number * 7)) for number in range(20_000)]
    for split, share in (("train", 0.70), ("validation", 0.15), ("test", 0.15)):
        assert drawn.count(split) / len(drawn) == pytest.approx(share, abs=0.01)


def test_columns_must_have_one_length() -> None:
    with pytest.raises(ValueError, match="no columns of one length"):
        samples([1, 2], [0, 5], [3, 3], [0])


def test_parts_are_joined_in_order() -> None:
    whole = joined([samples([1], [0], [9], [0]), samples([2, 2], [0, 5], [8, 3], [1, 1])])
    assert whole.remaining_tokens.tolist() == [9, 8, 3]
    assert whole.only(whole.requests == 1).generated_tokens.tolist() == [0, 5]


@pytest.mark.parametrize("inputs", INPUTS)
def test_features_are_as_wide_as_they_say(inputs: Inputs) -> None:
    states = np.ones((3, 6), np.float32)
    rows = features(inputs, states, [1, 2, 3], [0, 5, 10])
    assert rows.shape == (3, input_width(inputs, 6))
    assert rows.dtype == np.float32
    if inputs != "state":
        np.testing.assert_allclose(rows[:, -1], np.log1p([0, 5, 10]), rtol=1e-6)


def test_baselines_answer_with_medians() -> None:
    """200 requests: half have prompts of 10 tokens and 20 tokens of output, half 40 and 50."""
    rows = [
        (prompt, generated, total - generated, request)
        for request in range(200)
        for prompt, total in (((10, 20), (40, 50))[request % 2],)
        for generated in range(0, total, 10)
    ]
    train = samples(*(list(column) for column in zip(*rows, strict=True)))
    asked = samples([10, 40, 40, 500], [0, 0, 40, 100], [20, 50, 10, 1], [0, 1, 1, 2])
    assert Constant(train).predict(asked).tolist() == [20.0] * 4
    assert PromptOnly(train).predict(asked).tolist() == [20.0, 50.0, 10.0, 1.0]
    # Of those that have generated 40 tokens all have 10 to come; at the start it is 20 or 50.
    by_generated = GeneratedOnly(train).predict(asked)
    assert by_generated[2] == 10.0
    assert by_generated[0] == by_generated[1] == 35.0
