"""Models whose checkpoint has no `tokenizer.json`: what they are asked, and what comes back, as text and as tokens."""

from collections.abc import Iterator
from typing import Any

from tests.conformance.case import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Case
from tests.conformance.chat_cases import TOOL
from tests.conformance.rendering_cases import ASKED, TURNS

FORMATS = ("tekken", "tiktoken")
TEXT = "Größe 你好 x = 1234  # [INST] </s>\n\n[BOS]don't <think> 7"


def _asked(model: str, subject: str, name: str, path: str, **fields: Any) -> Case:
    given = {key: value for key, value in {"model": model, "temperature": 0, **fields}.items() if value is not ...}
    return Case(f"{subject}: {model}, {name}", path, given, served=model)


def _chat(model: str, name: str, messages: list[dict[str, Any]] = ASKED, **fields: Any) -> Case:
    return _asked(
        model, "chat", name, CHAT, messages=messages, **{"max_tokens": 12, "return_token_ids": True, **fields}
    )


def _of(model: str) -> Iterator[Case]:
    yield _chat(model, "plain")
    yield _chat(model, "streamed", stream=True, stream_options={"include_usage": True})
    yield _chat(model, "turns", TURNS)
    yield _chat(model, "a system's message", [{"role": "system", "content": "Be brief."}, *ASKED])
    yield _chat(model, "special tokens in a text", [{"role": "user", "content": TEXT}])
    yield _chat(model, "special tokens shown", skip_special_tokens=False, max_tokens=40)
    yield _chat(model, "logprobs", logprobs=True, top_logprobs=2)
    yield _chat(model, "a stop string", stop=["e", "o"], max_tokens=60)
    yield _asked(model, "completions", "plain", COMPLETIONS, prompt=TEXT, max_tokens=12, return_token_ids=True)
    yield _asked(model, "completions", "echo", COMPLETIONS, prompt=TEXT, max_tokens=4, echo=True)
    yield _asked(model, "completions", "tokens", COMPLETIONS, prompt=[40, 300, 41], max_tokens=40, ignore_eos=True)
    yield _asked(model, "tokenizer", "a text", "/tokenize", prompt=TEXT, temperature=...)
    yield _asked(model, "tokenizer", "a bare text", "/tokenize", prompt=TEXT, add_special_tokens=False, temperature=...)
    yield _asked(model, "tokenizer", "a chat", "/tokenize", messages=TURNS, temperature=...)
    yield _asked(model, "tokenizer", "tokens", "/detokenize", tokens=[1, 40, 300, 650], temperature=...)
    yield _asked(model, "responses", "plain", RESPONSES, input="Add 1 and 2.", max_output_tokens=12)
    yield _asked(model, "messages", "plain", MESSAGES, messages=ASKED, max_tokens=12)


CASES = [
    *(case for model in FORMATS for case in _of(model)),
    _chat("tekken", "json", response_format={"type": "json_object"}, max_tokens=40),
    _chat("tekken", "tools", tools=[TOOL]),
    _chat("tekken", "tools, streamed", tools=[TOOL], stream=True),
]
