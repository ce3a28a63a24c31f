"""Artefacts are swapped while they are served; a bad one never takes the place of a good one."""

from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from services.predictor.artefact import METADATA_FILE
from services.predictor.artefact_registry import ArtefactRegistry
from tests.unit.services.predictor.artefacts import FINGERPRINT, HIDDEN_SIZE, make_artefact


def test_an_artefact_that_comes_later_is_taken_up(tmp_path: Path) -> None:
    artefacts = ArtefactRegistry((tmp_path,))
    artefacts.reload()
    assert "there is no predictor.json" in artefacts.folders[0].refused
    metadata = make_artefact(tmp_path)
    artefacts.reload()
    assert artefacts.folders[0].refused == ""
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == metadata.version


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    artefacts = ArtefactRegistry((tmp_path,))
    first = make_artefact(tmp_path, seed=0)
    artefacts.reload()
    second = make_artefact(tmp_path, seed=1)
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == first.version
    artefacts.reload()
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == second.version != first.version
    artefacts.reload()
    assert artefacts.swaps_total == 2


def test_a_bad_one_is_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    artefacts = ArtefactRegistry((tmp_path,))
    good = make_artefact(tmp_path)
    artefacts.reload()
    (tmp_path / METADATA_FILE).write_text("{}")
    artefacts.reload()
    artefacts.reload()
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == good.version
    assert "is no artefact" in artefacts.folders[0].refused
    assert artefacts.refusals_total == 1, "it is looked at once, not at every look"
    better = make_artefact(tmp_path, seed=1)
    artefacts.reload()
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == better.version
    assert artefacts.folders[0].refused == ""


def test_an_artefact_that_is_copied_file_by_file_is_taken_up_once_it_is_whole(tmp_path: Path) -> None:
    trained, served = tmp_path / "trained", tmp_path / "served"
    metadata = make_artefact(trained)
    served.mkdir()
    artefacts = ArtefactRegistry((served,))
    for name in sorted(file.name for file in trained.iterdir()):  # as cp does: the description first
        assert not artefacts.folders[0].artefact
        (served / name).write_bytes((trained / name).read_bytes())
        artefacts.reload()
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == metadata.version
    assert artefacts.folders[0].refused == ""


def test_a_removed_artefact_goes_on_to_be_served(tmp_path: Path) -> None:
    artefacts = ArtefactRegistry((tmp_path,))
    good = make_artefact(tmp_path)
    artefacts.reload()
    (tmp_path / METADATA_FILE).unlink()
    artefacts.reload()
    assert artefacts.find("m", FINGERPRINT, HIDDEN_SIZE).metadata.version == good.version
    assert artefacts.folders[0].refused


def test_each_model_has_its_own(tmp_path: Path) -> None:
    folders = (tmp_path / "small", tmp_path / "large")
    make_artefact(folders[0], model="small", fingerprint="5" * 16)
    make_artefact(folders[1], model="large", fingerprint="6" * 16)
    artefacts = ArtefactRegistry(folders)
    artefacts.reload()
    assert artefacts.find("any name", "6" * 16, HIDDEN_SIZE).metadata.model == "large"
    with pytest.raises(
        ConfigurationError, match=r"no length predictor is loaded for the model 'medium' \(loaded: small@"
    ):
        artefacts.find("medium", "7" * 16, HIDDEN_SIZE)
    with pytest.raises(ConfigurationError, match="was trained on 'large'"):
        artefacts.find("large", "7" * 16, HIDDEN_SIZE)
    with pytest.raises(ConfigurationError, match="takes hidden states of width 8"):
        artefacts.find("large", "6" * 16, HIDDEN_SIZE + 1)
