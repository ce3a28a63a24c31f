"""What a learner makes of requests that end, one after another; it is told nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.prediction.conformal_band import ConformalBand
from controlplane.prediction.length_learner import (
    MOST_RUNNING,
    SAMPLES_OF_REQUEST,
    LengthLearner,
    running_requests,
)
from controlplane.prediction.length_quantiles import LengthQuantiles
from controlplane.prediction.repetition import FEATURES

HIDDEN = 8
EVERY = 8


class Traffic:
    """Requests one after another, whose state tells their length with noise."""

    def __init__(self, learner: LengthLearner, seed: int = 0) -> None:
        self.learner = learner
        self.draw = np.random.default_rng(seed)
        self.number = 0
        self.errors: list[float] = []
        self.covered: list[bool] = []
        self.drifted = 0

    def serve(self, requests: int, factor: float = 1.0, noise: float = 0.2) -> None:
        """`factor`: how much longer the answers are than their states say."""
        self.errors, self.covered = [], []
        for _ in range(requests):
            self.number += 1
            hint = float(self.draw.uniform(1.5, 4.2))
            total = max(1, int(np.exp(hint + noise * self.draw.standard_normal()) * factor))
            for generated in range(0, total, EVERY):
                state = self.draw.standard_normal((1, self.learner.hidden_size)).astype(np.float32)
                if self.learner.hidden_size:
                    state[0, 0] = hint
                said = self.learner.predict(
                    running_requests([str(self.number)], [10], [generated], state, np.zeros((1, FEATURES), np.float32))
                )
                if said is not None:
                    remaining = np.array([float(total - generated)])
                    self.errors.append(float(np.abs(said.median - remaining)[0]))
                    self.covered.append(bool(said.cover(remaining)[0]))
            self.drifted += self.learner.ended(str(self.number), total)
            while self.learner.learn():
                pass
        self.learner.validate()


@pytest.mark.slow
def test_it_learns_from_finished_requests_what_the_states_tell() -> None:
    traffic = Traffic(LengthLearner(HIDDEN))
    traffic.serve(60)
    assert not traffic.learner.standing.is_learnt or traffic.learner.ended_requests >= 50
    traffic.serve(240)
    traffic.serve(150)
    standing = traffic.learner.standing
    assert standing.is_learnt
    assert standing.mae_tokens < 0.5 * standing.residual_mae_tokens
    assert np.mean(traffic.errors) < 0.5 * standing.residual_mae_tokens
    assert np.mean(traffic.covered) > 0.7
    assert traffic.drifted == 0


def test_before_it_has_learnt_it_answers_with_the_residual_life() -> None:
    learner = LengthLearner(HIDDEN)
    asked = running_requests(["r"], [3], [40], np.zeros((1, HIDDEN), np.float32), np.zeros((1, FEATURES), np.float32))
    assert learner.predict(asked) is None
    for number in range(40):
        learner.ended(f"other-{number}", 50 + number)
    said = learner.predict(asked)
    assert said is not None
    assert (said.low[0], said.median[0], said.high[0]) == (14, 30, 46)
    assert not learner.standing.is_learnt


@pytest.mark.slow
def test_where_the_ranges_suddenly_miss_it_says_so_and_learns_anew() -> None:
    traffic = Traffic(LengthLearner(HIDDEN))
    traffic.serve(150)
    assert traffic.drifted == 0
    traffic.serve(60, factor=0.1)
    assert traffic.drifted >= 1
    traffic.serve(150, factor=0.1)
    assert np.mean(traffic.covered) > 0.65


@pytest.mark.parametrize("hidden", [0, HIDDEN, 300])
def test_what_was_learnt_outlives_a_restart(hidden: int) -> None:
    before = Traffic(LengthLearner(hidden))
    before.serve(80)
    after = LengthLearner(hidden)
    after.restore(before.learner.state())
    state = np.ones((1, hidden), np.float32)
    asked = running_requests(["new"], [10], [7], state, np.zeros((1, FEATURES), np.float32))
    expected, said = before.learner.predict(asked), after.predict(asked)
    assert expected is not None
    assert said is not None
    assert said.columns().tolist() == expected.columns().tolist()
    assert after.standing.ended_requests == before.learner.standing.ended_requests
    assert after.standing.mae_tokens == before.learner.standing.mae_tokens


def test_what_another_model_learnt_is_refused_and_changes_nothing() -> None:
    other = Traffic(LengthLearner(HIDDEN))
    other.serve(60)
    learner = LengthLearner(HIDDEN + 1)
    with pytest.raises(ValueError, match="of the shape"):
        learner.restore(other.learner.state())
    with pytest.raises(KeyError):
        learner.restore({})
    assert learner.standing.ended_requests == 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["see", "end", "learn"]), st.integers(0, 5)), max_size=80))
def test_any_order_of_events_keeps_the_bounds(events: list[tuple[str, int]]) -> None:
    learner = LengthLearner(2)
    progress: dict[int, int] = {}
    for kind, number in events:
        if kind == "see":
            progress[number] = progress.get(number, 0) + 7
            state = np.full((1, 2), np.nan if number == 5 else number, np.float32)
            said = learner.predict(
                running_requests([f"r{number}"], [1], [progress[number]], state, np.zeros((1, FEATURES), np.float32))
            )
            if said is not None:
                assert 1 <= said.low[0] <= said.median[0] <= said.high[0] < np.inf
        elif kind == "end":
            learner.ended(f"r{number}", progress.pop(number, 0) + 1)
        else:
            learner.learn()
        learner.validate()


def test_what_is_remembered_of_requests_that_never_end_is_bounded() -> None:
    learner = LengthLearner(0)
    learner.ended("first", 100)
    nothing, zeros = np.zeros((1000, 0), np.float32), np.zeros((1000, FEATURES), np.float32)
    for part in range(MOST_RUNNING // 1000 + 2):
        ids = [f"{part}-{row}" for row in range(1000)]
        learner.predict(running_requests(ids, [1] * 1000, [1] * 1000, nothing, zeros))
    for generated in range(2 * SAMPLES_OF_REQUEST):
        learner.predict(running_requests(["last"], [1], [generated], nothing[:1], zeros[:1]))
    learner.validate()


def test_a_band_that_is_too_narrow_is_widened_until_it_holds_four_of_five() -> None:
    draw = np.random.default_rng(1)
    band = ConformalBand()
    covered = []
    for _ in range(400):
        remaining = np.exp(4 + draw.standard_normal(5))
        raw = LengthQuantiles.of_columns(np.tile(np.exp([[3.9, 4.0, 4.1]]), (5, 1)))
        covered += band.adjusted(raw).cover(remaining).tolist()
        band.ended(raw, remaining)
    assert 0.76 < np.mean(covered[1000:]) < 0.84
