"""How scores come of vectors, and which texts are compared."""

import msgspec
import numpy as np
import pytest

from services.frontend.errors import ApiError
from services.frontend.pooling.schema import ScoreRequest
from services.frontend.pooling.scores import best_matches, cosine, sides


def test_the_angle_decides_and_not_the_length() -> None:
    first = np.array([[3.0, 4.0]], dtype=np.float32)
    assert cosine(first, 2 * first) == pytest.approx(1.0)
    assert cosine(first, np.array([[4.0, -3.0]], dtype=np.float32)) == pytest.approx(0.0)
    assert cosine(first, np.zeros((1, 2), dtype=np.float32)) == 0.0


def test_late_interaction_adds_the_best_match_of_each_token_of_the_query() -> None:
    query = np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32)
    document = np.array([[0.5, 0.0], [0.25, 1.0], [-1.0, -1.0]], dtype=np.float32)
    assert best_matches(query, document) == pytest.approx(0.5 + 2.0)
    assert best_matches(document, query) == pytest.approx(0.5 + 2.0 + -1.0)


@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_the_two_sides_have_four_pairs_of_names(names: tuple[str, str]) -> None:
    body = {"model": "m", names[0]: "a", names[1]: ["b", "c"]}
    assert sides(msgspec.convert(body, ScoreRequest)) == names


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "text_1"), ({"text_1": "a"}, "text_2"), ({"queries": "a"}, "documents"), ({"text_2": "a"}, "text_1")],
)
def test_a_side_that_is_missing_is_named(given: dict[str, str], missing: str) -> None:
    with pytest.raises(ApiError) as refused:
        sides(msgspec.convert(given, ScoreRequest))
    assert refused.value.param == missing
