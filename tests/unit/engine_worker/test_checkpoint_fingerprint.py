"""Checkpoints are told apart by what they hold."""

from pathlib import Path

import pytest

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from mesh.errors import ConfigurationError

MIB = 1024 * 1024


def checkpoint(path: Path, weights: bytes, config: str = "{}") -> str:
    path.mkdir()
    (path / "config.json").write_text(config)
    (path / "model.safetensors").write_bytes(weights)
    return checkpoint_fingerprint(path)


def test_copies_are_equal_and_others_are_not(tmp_path: Path) -> None:
    weights = bytes(5 * MIB)
    first = checkpoint(tmp_path / "a", weights)
    assert checkpoint(tmp_path / "b", weights) == first
    assert len(first) == 16
    others = {
        checkpoint(tmp_path / "c", b"\1" + weights[1:]),
        checkpoint(tmp_path / "d", weights[:-1] + b"\1"),
        checkpoint(tmp_path / "e", weights + b"\0"),
        checkpoint(tmp_path / "f", weights, '{"hidden_size": 2}'),
    }
    assert len(others | {first}) == 5


def test_more_files_of_weights_are_another_checkpoint(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "a", b"weights")
    (tmp_path / "a" / "more.safetensors").write_bytes(b"weights")
    (tmp_path / "a" / "README.md").write_text("does not count")
    second = checkpoint_fingerprint(tmp_path / "a")
    assert second != first
    (tmp_path / "a" / "README.md").unlink()
    assert checkpoint_fingerprint(tmp_path / "a") == second


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read as a checkpoint"):
        checkpoint_fingerprint(tmp_path)
