"""What there is of a model's text in its directory."""

from pathlib import Path

import pytest

from mesh.text_files import has_chat_template, has_tokenizer, read_text_files


@pytest.mark.parametrize(
    ("file", "is_one"),
    [
        ("tokenizer.json", True),
        ("tokenizer.model", True),
        ("tokenizer.model.v3", True),
        ("tokenizer_config.json", True),
        ("tekken.json", True),
        ("tiktoken.model", True),
        ("qwen.tiktoken", True),
        ("config.json", False),
        ("model.safetensors", False),
    ],
)
def test_whether_a_tokenizer_lies_beside_the_weights(tmp_path: Path, file: str, is_one: bool) -> None:
    assert not has_tokenizer(tmp_path)
    assert not has_tokenizer(tmp_path / "nowhere")
    (tmp_path / file).write_text("{}")
    assert has_tokenizer(tmp_path) is is_one


@pytest.mark.parametrize(
    ("file", "content", "has_one"),
    [
        ("chat_template.jinja", "hi", True),
        ("chat_template.json", "{}", True),
        ("tokenizer_config.json", '{"chat_template": "hi", "bos_token": "<s>"}', True),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "hi"}]}', True),
        ("tokenizer_config.json", '{"chat_template": null}', False),
        ("tokenizer_config.json", '{"bos_token": "<s>"}', False),
        ("tokenizer_config.json", "[", False),
        ("config.json", '{"chat_template": "hi"}', False),
    ],
)
def test_whether_a_checkpoint_says_how_a_chat_is_written(
    tmp_path: Path, file: str, content: str, has_one: bool
) -> None:
    (tmp_path / file).write_text(content)
    assert has_chat_template(read_text_files(tmp_path)) is has_one


def test_mistrals_own_file_is_not_handed_out_by_itself(tmp_path: Path) -> None:
    """Frontends of the release before take only files that they know."""
    (tmp_path / "tekken.json").write_text("{}")
    assert read_text_files(tmp_path) == {}
