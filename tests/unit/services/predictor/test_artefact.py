"""Artefacts: written whole, read back equal, refused when they are not what they say."""

import json
from pathlib import Path

import numpy as np
import pytest

from mesh.errors import ConfigurationError
from services.predictor.artefact import METADATA_FILE, load_artefact
from tests.unit.services.predictor.artefacts import FINGERPRINT, HIDDEN_SIZE, make_artefact, make_network


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    metadata = make_artefact(tmp_path, inputs="state+counts")
    artefact = load_artefact(tmp_path)
    assert artefact.metadata == metadata
    assert artefact.name == f"m@{metadata.version}"
    expected = make_network(inputs="state+counts")
    for mine, theirs in zip(artefact.network.weights, expected.weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_writing_again_leaves_one_file_of_weights(tmp_path: Path) -> None:
    make_artefact(tmp_path, seed=0)
    second = make_artefact(tmp_path, seed=1)
    assert [file.name for file in tmp_path.glob("weights-*")] == [second.weights_file]
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize(
    ("model", "fingerprint", "hidden_size", "reason"),
    [
        ("m", FINGERPRINT, HIDDEN_SIZE * 2, "takes hidden states of width 8, those of 'm' have 16"),
        (
            "other",
            "f" * 16,
            HIDDEN_SIZE,
            f"was trained on 'm' \\(checkpoint {FINGERPRINT}\\) and says nothing about 'other'",
        ),
        ("m", "f" * 16, HIDDEN_SIZE, "says nothing about 'm' \\(checkpoint ffffffffffffffff\\)"),
    ],
)
def test_another_model_or_width_is_refused(
    tmp_path: Path, model: str, fingerprint: str, hidden_size: int, reason: str
) -> None:
    make_artefact(tmp_path)
    artefact = load_artefact(tmp_path)
    artefact.check_model("renamed", FINGERPRINT, HIDDEN_SIZE)
    with pytest.raises(ConfigurationError, match=reason):
        artefact.check_model(model, fingerprint, hidden_size)


def _change(folder: Path, **fields: object) -> None:
    file = folder / METADATA_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"format": 99}, "has format 99, this version reads 1"),
        ({"weights_sha256": "0" * 64}, "is not the file that"),
        ({"sizes": [16, 8, 5, 1]}, "promises layers of the shapes"),
        ({"sizes": []}, "promises layers of the shapes"),
        ({"sizes": [16, 8, 4, 1, 1]}, "does not hold the layers"),
        ({"hidden_size": 9}, "promises layers of the shapes"),
        ({"inputs": "tea leaves"}, "is no artefact"),
        ({"weights_file": "gone.safetensors"}, "is no artefact"),
    ],
)
def test_a_damaged_artefact_is_refused(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    make_artefact(tmp_path)
    _change(tmp_path, **fields)
    with pytest.raises(ConfigurationError, match=reason):
        load_artefact(tmp_path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    metadata = make_artefact(tmp_path)
    weights = tmp_path / metadata.weights_file
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigurationError, match="is not the file that"):
        load_artefact(tmp_path)
    (tmp_path / METADATA_FILE).write_text("{")
    with pytest.raises(ConfigurationError, match="is no artefact"):
        load_artefact(tmp_path)
    with pytest.raises(ConfigurationError, match="is no artefact"):
        load_artefact(tmp_path / "nowhere")
