"""Training and evaluation on samples whose states tell the length. Skipped without torch."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from services.predictor.artefact import Artefact, load_artefact
from services.predictor.dataset import Dataset
from services.predictor.report import evaluate
from tests.unit.services.predictor.artefacts import make_artefact, make_dataset

if find_spec("torch") is None:
    pytest.skip("training needs PyTorch", allow_module_level=True)

import itertools

import torch

from services.predictor.training import Epoch, TrainingSettings, train_network

SETTINGS = TrainingSettings(hidden_sizes=(32, 16, 8), learning_rate=3e-3, batch_samples=64, epochs=15)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    torch.set_num_threads(1)
    return make_dataset(tmp_path_factory.mktemp("dataset"), requests=300).load()


def pairs(dataset: Dataset, split: str) -> tuple[np.ndarray, np.ndarray]:
    samples = dataset.splits[split]  # type: ignore[index]
    return samples.states, samples.remaining_tokens


@pytest.mark.slow
def test_it_learns_what_the_states_tell(dataset: Dataset, tmp_path: Path) -> None:
    epochs: list[Epoch] = []
    network = train_network(pairs(dataset, "train"), pairs(dataset, "validation"), SETTINGS, epochs.append)
    report = evaluate(Artefact(make_artefact(tmp_path), network), dataset)
    # The state is off by one standard normal in units of ten tokens: 8 tokens on average.
    assert report.mae_tokens["predictor"] < 11
    assert report.change_percent < -40
    assert report.best_baseline in ("constant", "prompt_only", "generated_only")
    best = min(epochs, key=lambda epoch: epoch.validation_mae_tokens)
    assert best.is_best
    # What is served is the very network that was judged, scales and all.
    assert report.mae_tokens_by_split["validation"] == pytest.approx(best.validation_mae_tokens, rel=1e-4)


@pytest.mark.slow
def test_it_stops_when_nothing_gets_better(dataset: Dataset) -> None:
    epochs: list[Epoch] = []
    settings = TrainingSettings(hidden_sizes=(8, 8, 8), learning_rate=0.0, epochs=50, patience_epochs=3)
    train_network(pairs(dataset, "train"), pairs(dataset, "validation"), settings, epochs.append)
    assert [epoch.is_best for epoch in epochs] == [True, False, False, False]


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(dataset: Dataset, tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(epoch: Epoch) -> None:
        if epoch.number == 4:
            raise Interrupted

    settings = TrainingSettings(hidden_sizes=(16, 8, 4), learning_rate=3e-3, epochs=6)
    train, validation, checkpoint = pairs(dataset, "train"), pairs(dataset, "validation"), tmp_path / "course.pt"
    whole: list[Epoch] = []
    expected = train_network(train, validation, settings, whole.append)
    with pytest.raises(Interrupted):
        train_network(train, validation, settings, interrupt, checkpoint=checkpoint)
    resumed: list[Epoch] = []
    network = train_network(train, validation, settings, resumed.append, checkpoint=checkpoint)
    assert resumed == whole
    for mine, theirs in zip(network.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not checkpoint.exists()


def test_evaluation_tells_errors_over_generated_tokens(dataset: Dataset, tmp_path: Path) -> None:
    make_artefact(tmp_path)
    report = evaluate(load_artefact(tmp_path), dataset)
    points = report.curves["generated_only"]
    assert sum(point.samples for point in points) == pytest.approx(report.samples["test"], abs=30)
    for earlier, later in itertools.pairwise(points):
        assert earlier.to_generated_tokens < later.from_generated_tokens
    weighted = sum(point.mae_tokens * point.samples for point in points) / sum(point.samples for point in points)
    assert weighted == pytest.approx(report.mae_tokens["generated_only"], rel=0.05)
