"""Where a checkpoint names its end of sequence."""

import json
from pathlib import Path

import pytest

from engine_worker.engines.vllm.checkpoint import (
    Vocabulary,
    has_mistral_tokenizer,
    has_recurrent_layers,
    read_vocabulary,
)
from mesh.errors import EngineFailed


def write(path: Path, **files: object) -> Path:
    for name, content in files.items():
        (path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("config", "is_recurrent"),
    [
        ({"model_type": "jamba", "mamba_d_state": 16}, True),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, True),
        ({"text_config": {"layer_types": ["linear_attention", "full_attention"]}}, True),
        ({"model_type": "recurrentgemma", "layers_block_type": ["recurrent", "attention"]}, True),
        ({"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}, False),
        ({"model_type": "llama"}, False),
    ],
)
def test_recurrent_layers_are_told_by_the_config(tmp_path: Path, config: dict[str, object], is_recurrent: bool) -> None:
    assert has_recurrent_layers(write(tmp_path, config=config)) == is_recurrent


def test_config_alone(tmp_path: Path) -> None:
    path = write(tmp_path, config={"vocab_size": 10, "eos_token_id": 2})
    assert read_vocabulary(path) == Vocabulary(10, (2,))


def test_the_generation_config_goes_before_the_config(tmp_path: Path) -> None:
    path = write(tmp_path, config={"vocab_size": 10, "eos_token_id": 2}, generation_config={"eos_token_id": [4, 3]})
    assert read_vocabulary(path) == Vocabulary(10, (3, 4))


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}])
def test_the_tokenizer_s_counts_too(tmp_path: Path, eos: object) -> None:
    path = write(
        tmp_path,
        config={"vocab_size": 10, "eos_token_id": 2},
        tokenizer_config={"eos_token": eos},
        tokenizer={"added_tokens": [{"id": 1, "content": "<s>"}, {"id": 7, "content": "</s>"}]},
    )
    assert read_vocabulary(path) == Vocabulary(10, (2, 7))


def test_a_model_may_have_no_end_of_sequence(tmp_path: Path) -> None:
    assert read_vocabulary(write(tmp_path, config={"vocab_size": 10})) == Vocabulary(10, ())


def test_the_text_part_of_a_larger_model(tmp_path: Path) -> None:
    path = write(tmp_path, config={"text_config": {"vocab_size": 10, "eos_token_id": 2}})
    assert read_vocabulary(path) == Vocabulary(10, (2,))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no config.json"),
        ({"config": {}}, "no vocab_size"),
        ({"config": "{"}, "is not JSON"),
        ({"config": [1]}, "is not a JSON object"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, files: dict[str, object], message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        read_vocabulary(write(tmp_path, **files))


@pytest.mark.parametrize(
    ("names", "is_mistrals"),
    [
        (("tekken.json", "params.json", "config.json"), True),
        (("tekken.json", "config.json"), False),
        (("params.json", "config.json"), False),
        (("tekken.json", "params.json", "tokenizer.json"), False),
    ],
)
def test_mistrals_repositories_are_known_by_their_files(
    tmp_path: Path, names: tuple[str, ...], is_mistrals: bool
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    assert has_mistral_tokenizer(tmp_path) is is_mistrals
