"""Models of the Hugging Face Hub, from a cache folder as huggingface_hub keeps it."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors, snapshot_download

from engine_worker.checkpoint_source import Fetch, is_hugging_face_id, locate_checkpoint
from mesh.errors import ConfigurationError

COMMIT = "a" * 40


def cache_with(folder: Path, *files: str) -> Fetch:
    """A cache with one model, asked without a network."""
    model = folder / "models--Qwen--Qwen3-0.6B"
    snapshot = model / "snapshots" / COMMIT
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    return partial(snapshot_download, cache_dir=folder, local_files_only=True)


def test_what_is_no_id_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_checkpoint(str(tmp_path)) == tmp_path
    assert not is_hugging_face_id("demo-large")
    assert not is_hugging_face_id("/models/a")
    assert not is_hugging_face_id("./models/a")
    (tmp_path / "models" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hugging_face_id("models/a")
    assert is_hugging_face_id("models/b")
    assert is_hugging_face_id("Qwen/Qwen3-0.6B@main")


def test_a_cached_model_needs_no_network(tmp_path: Path) -> None:
    fetch = cache_with(tmp_path, "tokenizer.json", "model.safetensors")
    folder = locate_checkpoint("Qwen/Qwen3-0.6B", fetch=fetch)
    assert folder == tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / COMMIT
    assert locate_checkpoint(f"Qwen/Qwen3-0.6B@{COMMIT}", fetch=fetch) == folder


def test_a_model_that_is_not_cached_is_told_without_a_network(tmp_path: Path) -> None:
    fetch = cache_with(tmp_path, "tokenizer.json")
    with pytest.raises(ConfigurationError, match=r"Qwen/Other is not in the cache.*hf download Qwen/Other"):
        locate_checkpoint("Qwen/Other", fetch=fetch)


def test_old_weights_will_do_and_none_will_not(tmp_path: Path) -> None:
    old, none = tmp_path / "old", tmp_path / "none"
    assert locate_checkpoint("Qwen/Qwen3-0.6B", fetch=cache_with(old, "tokenizer.json", "pytorch_model.bin")).is_dir()
    without = cache_with(none, "tokenizer.json")
    with pytest.raises(ConfigurationError, match="holds no weights"):
        locate_checkpoint("Qwen/Qwen3-0.6B", fetch=without)
    assert locate_checkpoint("Qwen/Qwen3-0.6B", with_weights=False, fetch=without).is_dir()


def test_weights_are_fetched_only_where_they_are_needed(tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def fetch(repo: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.append(allow_patterns)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    locate_checkpoint("Qwen/Qwen3-0.6B", with_weights=False, fetch=fetch)
    locate_checkpoint("Qwen/Qwen3-0.6B", fetch=fetch)
    assert ["*.safetensors" in patterns for patterns in asked] == [False, True]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.GatedRepoError, "is gated: accept its terms"),
        (errors.RevisionNotFoundError, "has no revision 'x'"),
        (errors.RepositoryNotFoundError, "there is no model Qwen/Qwen3-0.6B"),
        (errors.LocalEntryNotFoundError, "HF_HUB_OFFLINE"),
        (OSError, "could not be fetched"),
    ],
)
def test_what_goes_wrong_says_what_to_do(kind: type[Exception], reason: str) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise kind.__new__(kind)

    with pytest.raises(ConfigurationError, match=reason):
        locate_checkpoint("Qwen/Qwen3-0.6B@x", fetch=fetch)
