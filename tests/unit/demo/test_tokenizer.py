import json
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo.tasks import generate
from demo.tokenizer import (
    BOS_ID,
    EOS_ID,
    MODEL_NAMES,
    MODELS_DIR,
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    encode_answer,
    encode_prompt,
    load_tokenizer,
    train_tokenizer,
)
from demo.words import WORDS

TOKENIZER = load_tokenizer()


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool, tools: list[Any] | None = None) -> str:
    """Render the committed chat template as a serving frontend does."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    config: dict[str, Any] = json.loads((MODELS_DIR / "demo-small" / "tokenizer_config.json").read_text())
    template = jinja2.Environment(autoescape=False).from_string(config["chat_template"])
    return template.render(
        messages=messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        bos_token=config["bos_token"],
        eos_token=config["eos_token"],
        raise_exception=raise_exception,
    )


@given(st.text())
def test_any_text_survives(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    if not any(special in text for special in SPECIAL_TOKENS):
        assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.encode(text).ids == [BOS_ID, *ids]


def test_special_tokens_come_first() -> None:
    assert [TOKENIZER.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert TOKENIZER.get_vocab_size() == VOCAB_SIZE


def test_digits_and_listed_words_are_single_tokens() -> None:
    assert TOKENIZER.encode("2025", add_special_tokens=False).tokens == ["2", "0", "2", "5"]
    assert [word for word in WORDS if len(TOKENIZER.encode(f" {word}", add_special_tokens=False).ids) != 1] == []


@pytest.mark.slow
def test_training_gives_the_committed_tokenizer() -> None:
    assert json.loads(train_tokenizer().to_str()) == json.loads(TOKENIZER.to_str())


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_all_models_share_the_files(file: str) -> None:
    assert len({(MODELS_DIR / name / file).read_bytes() for name in MODEL_NAMES}) == 1


def test_the_chat_template_gives_the_prompts_that_the_models_were_trained_on() -> None:
    for task in generate(1, 50):
        text = render([{"role": "user", "content": task.prompt}], add_generation_prompt=True)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == encode_prompt(TOKENIZER, task.prompt)


def test_the_chat_template_covers_system_messages_and_earlier_turns() -> None:
    messages = [
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Sum: 1 2"},
        {"role": "assistant", "content": "1 +2=3"},
        {"role": "user", "content": "Sum: 2 2"},
    ]
    conversation = "<s><|system|>Be exact.</s><|user|>Sum: 1 2</s><|assistant|>1 +2=3</s><|user|>Sum: 2 2</s>"
    assert render(messages, add_generation_prompt=False) == conversation
    assert render(messages, add_generation_prompt=True) == conversation + "<|assistant|>"


def test_the_chat_template_refuses_unknown_roles() -> None:
    with pytest.raises(jinja2.TemplateError, match="unknown role critic"):
        render([{"role": "critic", "content": "?"}], add_generation_prompt=True)


def test_the_chat_template_tells_of_tools_and_of_earlier_calls() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "1 + 2"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    prompt = render(messages, add_generation_prompt=True, tools=[{"type": "function"}])
    assert prompt.startswith('<s><|system|>Tools: {"type": "function"}</s><|user|>1 + 2</s><|assistant|><tool_call>')
    assert prompt.endswith("</tool_call></s><|user|>3</s><|assistant|>")


def test_answers_end_with_eos() -> None:
    ids = encode_answer(TOKENIZER, "1 2 3")
    assert ids[-1] == EOS_ID
    assert TOKENIZER.decode(ids) == "1 2 3"
    config = json.loads((MODELS_DIR / "demo-small" / "generation_config.json").read_text())
    assert config["eos_token_id"] == EOS_ID


def test_the_tokenizer_file_is_readable_on_its_own() -> None:
    path = MODELS_DIR / "demo-large" / "tokenizer.json"
    assert Tokenizer.from_file(str(path)).encode("Sum: 1").ids[0] == BOS_ID
