import functools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from mesh.errors import ConfigurationError
from mesh.runtime import SystemClock
from mesh.text_files import read_text_files
from services.frontend.text.model_text import ModelText
from tests.unit.services.frontend.checkpoints import CHAT_TEMPLATE, KINDS, write_checkpoint
from tests.unit.services.frontend.text.test_chunked import texts


@functools.cache
def _model_of(kind: str) -> ModelText:
    return ModelText(KINDS[kind](), None, frozenset())


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


def test_chats_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, template="")
    named = {"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}"}
    forms = [{"name": name, "template": source} for name, source in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": forms}))
    text = ModelText.load(tmp_path, SystemClock().unix_s)
    assert text.tool_template is not None
    assert text.tool_template.render([], variables={"tools": [{"name": "f"}]}) == "f"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert ModelText.load(tmp_path, SystemClock().unix_s).tool_template is None, "that file goes before"


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


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(texts, st.integers(1, 300).map(" ".__mul__), st.integers(1, 300).map("e\u0301\u0323".__mul__)))
def test_no_text_has_fewer_tokens_than_its_length_says(kind: str, text: str) -> None:
    model = _model_of(kind)
    assert model.fewest_tokens(text) <= len(model.encode(text))


@pytest.mark.parametrize(("kind", "is_known"), [("gpt2", True), ("llama3", True), ("metaspace", False)])
def test_where_it_is_known_a_long_text_has_many_tokens(kind: str, is_known: bool) -> None:
    assert (_model_of(kind).fewest_tokens("x" * 1_000_000) > 1000) == is_known


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


@pytest.mark.parametrize(
    ("config", "labels"),
    [
        ({}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"num_labels": 2}, ["LABEL_0", "LABEL_1", "LABEL_2"]),
        ({"id2label": {"0": "bad", "1": "good"}}, ["bad", "good", None]),
        ({"id2label": {"first": "bad"}}, [None, None, None]),
    ],
)
def test_classes_have_the_names_of_the_configuration(
    model_path: Path, config: dict[str, object], labels: list[str | None]
) -> None:
    files = {**read_text_files(model_path), "config.json": json.dumps(config).encode()}
    text = ModelText.from_files(files, "here", lambda: 0.0)
    assert [text.label(number) for number in range(3)] == labels


@functools.cache
def _pairing() -> Tokenizer:
    """A tokenizer with a form for pairs, as BERT's rerankers have it."""
    tokenizer = KINDS["unigram"]()
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", begin), ("</s>", end)],
    )
    return tokenizer


@given(first=texts, second=texts, kept_tokens=st.integers(4, 40))
def test_a_pair_is_cut_as_the_tokenizer_cuts_it(first: str, second: str, kept_tokens: int) -> None:
    tokenizer = _pairing()
    model = ModelText(tokenizer, None, frozenset())
    both = (first, second) if second else (first,)
    assert model.pair(first, second)[0] == tokenizer.encode(*both).ids
    tokenizer.enable_truncation(kept_tokens, strategy="longest_first")
    try:
        expected = tokenizer.encode(*both)
    finally:
        tokenizer.no_truncation()
    assert model.pair(first, second, kept_tokens) == (expected.ids, expected.type_ids)
    assert len(expected) <= kept_tokens


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts, tokens=st.integers(1, 20))
def test_the_beginning_of_a_text_has_no_more_tokens_than_asked_for(kind: str, text: str, tokens: int) -> None:
    model = _model_of(kind)
    beginning = model.beginning(text, tokens)
    assert text.startswith(beginning)
    assert len(model.encode(beginning)) <= tokens
    if len(model.encode(text)) <= tokens:
        assert beginning == text


@pytest.mark.parametrize(
    ("file", "content", "instructions"),
    [
        ("config_sentence_transformers.json", {"prompts": {"query": "Find: ", "other": 7}}, {"query": "Find: "}),
        ("config.json", {"task_instructions": {"query": "Find: "}}, {"query": "Find: "}),
        ("config.json", {"task_instructions": "Find: "}, {}),
    ],
)
def test_an_embedding_model_says_what_it_wants_to_be_told(
    model_path: Path, file: str, content: dict[str, object], instructions: dict[str, str]
) -> None:
    files = {**read_text_files(model_path), file: json.dumps(content).encode()}
    assert ModelText.from_files(files, "here", lambda: 0.0).instructions == instructions
