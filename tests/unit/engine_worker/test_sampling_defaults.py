"""What the makers of a model say of sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_worker.sampling_defaults import sampling_defaults
from mesh.errors import ConfigurationError

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "max_new_tokens": 9}


def write(directory: Path, content: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "generation_config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_the_model_s_own_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 9}
    assert sampling_defaults(write(tmp_path, QWEN), "auto", "") == expected
    assert sampling_defaults(write(tmp_path, {"top_p": None, "top_k": -1, "min_p": 0}), "auto", "") == {
        "top_k": 0,
        "min_p": 0.0,
    }


def test_a_model_without_a_file_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto", "") == {}


def test_others_go_before_the_model_s(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", QWEN), write(tmp_path / "other", {"min_p": 0.1})
    assert sampling_defaults(model, "vllm", "") == {}
    assert sampling_defaults(model, str(other), "") == {"min_p": 0.1}
    assert sampling_defaults(model, "vllm", '{"temperature": 0}') == {"temperature": 0.0}
    assert sampling_defaults(model, "auto", '{"temperature": 1.5}')["temperature"] == 1.5


@pytest.mark.parametrize(
    ("content", "override", "message"),
    [
        ("{", "", "no valid JSON"),
        ([1], "", "must be a JSON object"),
        ({"temperature": 3}, "", "temperature must be from 0 to 2, got 3.*--override-generation-config"),
        ({"temperature": "hot"}, "", "must be a number"),
        ({"top_k": 1.5}, "", "must be a number"),
        ({"max_new_tokens": 0}, "", "above 0"),
        ({}, '{"top_p": true}', "must be a number"),
        ({}, "[", "--override-generation-config is no valid JSON"),
    ],
)
def test_what_no_request_could_have_is_refused(tmp_path: Path, content: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling_defaults(write(tmp_path, content), "auto", override)


def test_a_directory_that_was_named_must_have_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there is no"):
        sampling_defaults(tmp_path, str(tmp_path / "nowhere"), "")
