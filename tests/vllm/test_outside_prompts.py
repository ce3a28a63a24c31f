"""Prompts of this frontend against those of vLLM's own renderer, and those that only vLLM makes."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh.runtime import SystemThreads
from penstock.v1 import parser_pb2
from services.frontend.errors import ApiError
from services.frontend.requests.models import ServedModel
from services.frontend.requests.plan import plan_chat
from services.frontend.requests.rendering import prompt_body
from services.frontend.requests.schema import ChatCompletionRequest
from services.frontend.text.model_text import ModelText
from tests.examples import examples
from tests.vllm.moving import MODEL

pytestmark = pytest.mark.vllm

CONTEXT_TOKENS = 4096
TEXT_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for d in documents or [] %}<{{ d.title }}>{{ d.text }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}<no thought>{% endif %}"
    "{% if reasoning_effort is defined %}<effort {{ reasoning_effort }}>{% endif %}"
    "{%- for m in messages %}\n    <{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}>\n"
    "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson(indent=2) }}"
    "{{ call.function.arguments | tojson(separators=(',', ':'), ensure_ascii=false) }}{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}{% if loop.index > 7 %}{% break %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARTS_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}[{{ part.type }}:{{ part.text }}{{ part.mood }}]{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
STRICT_TEMPLATE = (
    "{% if messages[0].role == 'assistant' %}{{ raise_exception('the assistant begins') }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}"
)
TEMPLATES = {"text": TEXT_TEMPLATE, "parts": PARTS_TEMPLATE, "strict": STRICT_TEMPLATE, "own": None}
TOLD_OF_TOOLS = ("text", "own")

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00", exclude_categories=["Cs"]), max_size=12)
WORDS = st.sampled_from(
    ["Hi", " there", "x-anthropic-billing-header: cc=1\nBe brief.", "x-anthropic-billing-header: 2"]
)
SAID = TEXTS | WORDS
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.just("text"), "text": SAID}, optional={"mood": st.sampled_from(["good", "bad"])}),
    max_size=3,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "größe"]), TEXTS | st.integers(-5, 5), max_size=2)
CALLS = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(["a", "b"]),
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g"]), "arguments": ARGUMENTS.map(lambda value: json.dumps(value))}
            ),
        }
    ),
    min_size=1,
    max_size=2,
)
MESSAGES = st.one_of(
    st.fixed_dictionaries({"role": st.just("system"), "content": SAID | PARTS}),
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": SAID | PARTS}, optional={"name": st.sampled_from(["Ann", "Bo"])}
    ),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": SAID | st.none()}, optional={"reasoning": SAID, "tool_calls": CALLS}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "content": SAID | PARTS, "tool_call_id": st.just("a")}),
)
FUNCTION = {"name": "f", "description": "What it does", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
TOOLS = st.sampled_from(
    [
        [TOOL],
        [{"type": "function", "function": {**FUNCTION, "strict": False, "defer_loading": True}}],
        [{"type": "function", "function": {"name": "f"}, "defer_loading": False}],
    ]
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "tools": TOOLS,
        "documents": st.just([{"title": "A", "text": "b"}]),
        "reasoning_effort": st.sampled_from(["none", "low", "high"]),
        "chat_template_kwargs": st.sampled_from([{"enable_thinking": False}, {"reasoning_effort": "odd"}]),
        "add_generation_prompt": st.booleans(),
        "add_special_tokens": st.booleans(),
        "continue_final_message": st.booleans(),
        "truncate_prompt_tokens": st.sampled_from([-1, 1, 7, 3000]),
        "truncation_side": st.sampled_from(["left", "right"]),
    },
)


@dataclass(frozen=True)
class Both:
    """The two ways from a chat to its prompt."""

    loop: asyncio.AbstractEventLoop
    renderers: Any
    folder: Path

    def here(self, name: str, body: Mapping[str, Any]) -> tuple[list[int], str] | None:
        """None: it is refused."""
        text = ModelText.load(self.folder / name, lambda: 0.0)
        model = ServedModel("m", text, 32, CONTEXT_TOKENS, 0)
        request = msgspec.convert(dict(body), ChatCompletionRequest)
        try:
            plan = self.loop.run_until_complete(plan_chat(request, "chat", model, SystemThreads()))
        except ApiError as error:
            if error.status != 400:
                raise
            return None
        (prompt,) = plan.prompts
        return list(prompt.token_ids), prompt.text or ""

    def vllm(self, name: str, body: Mapping[str, Any], mode: str = "") -> tuple[list[int], str] | None:
        model = parser_pb2.ParserModel(
            directory=str(self.folder / name), tokenizer_mode=mode, max_model_len_tokens=CONTEXT_TOKENS
        )
        request = msgspec.convert(dict(body), ChatCompletionRequest)
        rendered = self.loop.run_until_complete(self.renderers.render(model, prompt_body(request, tells_choice=False)))
        return None if rendered.HasField("refused") else (list(rendered.token_ids), rendered.text)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    from services.parser.vllm_renderer import VllmRenderers

    folder = tmp_path_factory.mktemp("rendered")
    for name, template in TEMPLATES.items():
        (folder / name).mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
            (folder / name / file).write_bytes((MODEL / file).read_bytes())
        if template is not None:
            (folder / name / "chat_template.jinja").write_text(template)
    loop = asyncio.new_event_loop()
    yield Both(loop, VllmRenderers(), folder)
    loop.close()


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None, max_examples=examples(150, thorough=2000))
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4), fields=FIELDS)
def test_both_ways_make_the_same_prompt(
    both: Both, name: str, messages: list[dict[str, Any]], fields: dict[str, Any]
) -> None:
    body: dict[str, Any] = {"messages": messages, "return_prompt_text": True, **fields}
    if name not in TOLD_OF_TOOLS:  # tools are refused then, and vLLM leaves them out
        body.pop("tools", None)
    if body.get("continue_final_message"):
        body.pop("add_generation_prompt", None)
    if "tools" in body:
        body["tool_choice"] = "none"
    assert both.here(name, body) == both.vllm(name, body)


def test_a_mode_of_vllms_own_writes_what_no_template_says(both: Both) -> None:
    rendered = both.vllm("own", {"messages": [{"role": "user", "content": "Hi"}]}, "deepseek_v32")
    assert rendered is not None
    token_ids, text = rendered
    assert text == "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    assert token_ids == ModelText.load(both.folder / "own", lambda: 0.0).encode(text)
    thinks = both.vllm(
        "own", {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": "high"}, "deepseek_v32"
    )
    assert thinks is not None
    assert thinks[1] == text.replace("</think>", "<think>")


@pytest.mark.parametrize("mode", ["deepseek_v4", "deepseek_v41", "kimi_k3"])
def test_other_modes_can_be_used(both: Both, mode: str) -> None:
    said = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "tools": [TOOL],
    }
    ours, theirs = both.here("own", {**said, "tool_choice": "none"}), both.vllm("own", said, mode)
    assert theirs is not None
    assert (theirs == ours) is (mode == "kimi_k3"), "Kimi's fills in the model's template, here one that knows no more"
    text = ModelText.load(both.folder / "own", lambda: 0.0).decode(theirs[0], skip_special_tokens=False)
    assert all(word in text for word in ("Be brief.", "Hi", "What it does"))


def test_harmony_is_written_as_tokens(both: Both) -> None:
    """Whatever chat template the checkpoint has."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding

    folder = both.folder / "harmony"
    folder.mkdir()
    for file in (both.folder / "own").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]})
    )
    body = {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        "tools": [TOOL],
    }
    rendered = both.vllm("harmony", {**body, "reasoning_effort": "low"})
    assert rendered is not None
    token_ids, _ = rendered
    text = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS).decode(token_ids)
    assert text.startswith("<|start|>system<|message|>")
    assert "Reasoning: low" in text
    assert "Be brief." in text
    assert "type f = " in text
    assert text.endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert both.vllm("harmony", {**body, "reasoning_effort": "none"}) is None, "it has no such effort"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "thinking", "thinking": "Hm"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "tool_reference", "name": "f"}]},
        {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}},
    ],
)
def test_what_a_frontend_does_not_know_is_rendered_by_vllm(both: Both, message: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}, message]}
    assert both.here("own", body) is None
    assert both.vllm("own", body) is not None
