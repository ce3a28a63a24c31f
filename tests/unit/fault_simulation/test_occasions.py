"""What a few seeds get besides what they draw."""

import random
from collections.abc import Callable

import pytest

from fault_simulation.draws import draw
from fault_simulation.occasions import OCCASIONS, SHARE, with_occasion
from fault_simulation.run import run_timeline
from fault_simulation.timeline import Timeline, Topology

EMPTY = Timeline(1, Topology(), (), ())


def test_few_seeds_get_one_and_all_are_drawn() -> None:
    changed = [with_occasion(random.Random(seed), EMPTY) for seed in range(1000)]
    given = [timeline for timeline in changed if timeline != EMPTY]
    assert len(given) == pytest.approx(1000 * SHARE, rel=0.3)
    assert {tuple(request.behaviour for request in timeline.requests) for timeline in given} == {
        ("stalls",) * 6,
        ("returns",) * 4,
        ("reads",) * 8,
        ("reads",) * 3,
    }


def test_requests_keep_their_numbers() -> None:
    for seed in range(200):
        numbers = [request.number for request in draw(seed).requests]
        assert sorted(numbers) == list(range(len(numbers)))


@pytest.mark.slow
@pytest.mark.parametrize("occasion", OCCASIONS, ids=lambda occasion: occasion.__name__)
def test_a_mesh_lives_through_each(occasion: Callable[[random.Random, Timeline, float], Timeline]) -> None:
    outcome = run_timeline(occasion(random.Random(1), EMPTY, 10.0))
    assert not outcome.violations, "\n".join(map(str, outcome.violations))
