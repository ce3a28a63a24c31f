"""Predictors that know the truth and err on purpose."""

import numpy as np
import pytest

from simulator.rescheduling.remaining_lengths import Binned, Every, Figure7Errors, Oracle

KEYS = np.arange(20_000, dtype=np.uint64)


def mae(generated: int, total: int) -> float:
    done, truth = np.full(len(KEYS), generated), np.full(len(KEYS), total)
    return float(np.abs(Figure7Errors(0).predict(KEYS, done, truth) - (truth - done)).mean())


def test_the_error_model_errs_as_much_as_the_paper_says() -> None:
    assert mae(0, 31_000) == pytest.approx(18_256, rel=0.02)
    assert mae(8_000, 31_000) == pytest.approx(2_929, rel=0.05)
    assert mae(30_000, 31_000) < 30


def test_predictions_follow_from_seed_request_and_progress() -> None:
    done, truth = np.arange(100, dtype=np.int64), np.full(100, 5_000)
    keys = KEYS[:100]
    first = Figure7Errors(1).predict(keys, done, truth)
    assert first.tolist() == Figure7Errors(1).predict(keys, done, truth).tolist()
    assert first.tolist() != Figure7Errors(2).predict(keys, done, truth).tolist()
    one_by_one = [Figure7Errors(1).predict(keys[[at]], done[[at]], truth[[at]])[0] for at in range(100)]
    assert first.tolist() == one_by_one
    assert first.min() >= 0


def test_bins_tell_their_middles() -> None:
    done, truth = np.zeros(4, dtype=np.int64), np.array([0, 8_191, 8_192, 32_768])
    binned = Binned(Oracle(), (0, 8_192, 32_768)).predict(KEYS[:4], done, truth)
    assert binned.tolist() == [4_096, 4_096, 20_480, 20_480]


def test_between_two_questions_the_answer_counts_down() -> None:
    predictor = Every(Binned(Oracle(), (0, 8_192, 32_768)), 20)
    done, truth = np.array([0, 19, 20, 5_000]), np.full(4, 8_200)
    # Asked at 0, 0, 20 and 5,000: of 8,200, 8,200, 8,180 and 3,200 tokens.
    assert predictor.predict(KEYS[:4], done, truth).tolist() == [20_480, 20_461, 4_096, 4_096]
    assert Every(Oracle(), 20).predict(KEYS[:1], np.array([37]), np.array([50])).tolist() == [13]


def test_the_error_models_band_holds_four_of_five() -> None:
    """Where it knows anything: from the moment on at which its errors cannot make up for all that is predicted."""
    random = np.random.default_rng(0)
    for generated in (2_000, 4_000, 8_000):
        done = np.full(len(KEYS), generated, dtype=np.int64)
        truth = generated + random.integers(1_000, 20_000, len(KEYS))
        predicted = Figure7Errors(0).predict(KEYS, done, truth)
        low, high = Figure7Errors(0).band(done, predicted)
        assert np.all((low >= 0) & (low <= high))
        assert 0.7 <= ((low <= truth - done) & (truth - done <= high)).mean() <= 0.95
    nothing_known = Figure7Errors(0).band(np.array([0]), np.array([5_000]))
    assert nothing_known.tolist() == [[0], [32_768]]


def test_bands_of_those_who_know_more_or_less() -> None:
    generated, predicted = np.array([37]), np.array([4_000])
    assert Oracle().band(generated, predicted).tolist() == [[4_000], [4_000]]
    binned = Binned(Oracle(), (0, 8_192, 32_768))
    assert binned.band(generated, predicted).tolist() == [[0], [8_192]]
    assert Every(binned, 20).band(generated, predicted).tolist() == [[0], [8_192 - 17]], "asked 17 tokens ago"
