import json
from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.checkpoints import CHAT_TEMPLATE, KINDS, write_checkpoint


def test_a_checkpoint_gives_tokenizer_template_and_ends(tmp_path: Path) -> None:
    model = ModelText.load(write_checkpoint(tmp_path), SystemClock().unix_s)
    assert model.eos_token_ids == {1}
    assert model.with_added_tokens([7]) == [0, 7]
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "hi"}]) == "<s><|user|>hi<|assistant|>"
    assert model.vocabulary_size > 256


def test_more_ends_may_stand_in_the_generation_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert ModelText.load(tmp_path, SystemClock().unix_s).eos_token_ids == {1, 3}


@pytest.mark.parametrize("form", [CHAT_TEMPLATE, [{"name": "default", "template": CHAT_TEMPLATE}]])
def test_the_template_may_stand_in_the_tokenizer_config(tmp_path: Path, form: object) -> None:
    write_checkpoint(tmp_path, template="")
    assert ModelText.load(tmp_path, SystemClock().unix_s).template is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": form}))
    assert ModelText.load(tmp_path, SystemClock().unix_s).template is not None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "no valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, content: str, message: str) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        ModelText.load(tmp_path, SystemClock().unix_s)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no tokenizer\.json"):
        ModelText.load(tmp_path, SystemClock().unix_s)


@pytest.mark.parametrize("kind", ["gpt2", "metaspace"])
def test_every_token_has_a_text(kind: str) -> None:
    model = ModelText(KINDS[kind](), None, frozenset())
    for token_id in range(model.vocabulary_size):
        text, spelled = model.token_text(token_id)
        assert spelled
        assert text == spelled.decode("utf-8", "replace")
