"""Datasets: written in parts, taken up again, split by request."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from mesh.errors import ConfigurationError
from services.predictor.dataset import DatasetFolder
from tests.unit.services.predictor.artefacts import DESCRIPTION, make_dataset


def test_a_request_is_in_one_split_only(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path).load()
    seen = [set(samples.requests.tolist()) for samples in dataset.splits.values()]
    assert not (seen[0] & seen[1])
    assert not (seen[0] & seen[2])
    assert not (seen[1] & seen[2])
    assert set.union(*seen) == set(range(200))
    assert sum(dataset.requests.values()) == 200
    assert dataset.requests["train"] > 110


def test_samples_keep_their_request_s_lengths(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path).load()
    for samples in dataset.splits.values():
        assert (samples.remaining_tokens >= 1).all()
        for number in np.unique(samples.requests)[:20]:
            own = samples.only(samples.requests == number)
            assert (own.prompt_tokens == len(dataset.prompts[int(number)])).all()
            assert len(set((own.generated_tokens + own.remaining_tokens).tolist())) == 1
            assert own.generated_tokens.tolist() == list(range(0, len(own) * 5, 5))


def test_a_folder_is_taken_up_by_the_same_run_only(tmp_path: Path) -> None:
    make_dataset(tmp_path, requests=100)
    folder = DatasetFolder(tmp_path)
    assert folder.open(DESCRIPTION) == frozenset((0, 1))
    with pytest.raises(ConfigurationError, match=r"seed 0, asked for 7\): choose another folder"):
        folder.open(msgspec.structs.replace(DESCRIPTION, seed=7))


def test_what_is_no_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="collect samples first"):
        DatasetFolder(tmp_path).load()
    folder = make_dataset(tmp_path, requests=50)
    (tmp_path / "part-00001.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigurationError, match="delete it and collect again"):
        folder.load()
