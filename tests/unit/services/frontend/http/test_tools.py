"""Tools and reasoning, as the official client sees them."""

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from tokenizers import AddedToken

from engine_worker.parser_names import FRONTENDS_REASONING_PARSERS, FRONTENDS_TOOL_PARSERS
from penstock.v1 import request_pb2
from services.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from tests.unit.services.frontend.checkpoints import CHAT_TEMPLATE, byte_level, metaspace, write_checkpoint
from tests.unit.services.frontend.fakes import Delta, tokens
from tests.unit.services.frontend.mesh_of_fakes import MeshOfFakes, mesh_of_fakes

pytestmark = [pytest.mark.slow, pytest.mark.live]

TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ bos_token }}", "{{ bos_token }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
).replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}({{ call.function.arguments.city }})"
    "{% endfor %}",
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
USER: Any = [{"role": "user", "content": "Weather?"}]
ANSWERS = {
    "hermes": 'Let me look.<tool_call>{"name": "weather", "arguments": {"city": "Ber\\"gen", "days": 3}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Ber\\"gen", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "qwen3_coder": 'Let me look.<tool_call><function=weather><parameter=city>\nBer"gen\n</parameter>'
    "<parameter=days>\n3\n</parameter></function></tool_call><tool_call><function=now></function></tool_call>",
}
CALLS = [("weather", {"city": 'Ber"gen', "days": 3}), ("now", {})]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows tools and thinks."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
    return write_checkpoint(tmp_path_factory.mktemp("tools"), tokenizer, TEMPLATE)


@asynccontextmanager
async def saying(checkpoint: Path, text: str, **attributes: str) -> AsyncIterator[MeshOfFakes]:
    """A mesh whose model says `text`, two tokens a step."""

    def script(_: request_pb2.GenerateRequest) -> Iterable[Delta]:
        ids = mesh.ids(text)
        return tokens(*(ids[at : at + 2] for at in range(0, len(ids), 2)))

    async with mesh_of_fakes(checkpoint) as mesh:
        await mesh.add_worker(script, attributes=attributes)
        yield mesh


async def whole(mesh: MeshOfFakes, **fields: Any) -> Any:
    async with mesh.client() as client:
        return (await client.chat.completions.create(model="demo", **{"messages": USER, **fields})).choices[0]


async def streamed(mesh: MeshOfFakes, **fields: Any) -> tuple[str, str, list[tuple[str, str, str]], str]:
    """Reasoning, content, id, name and arguments of the calls, finish reason."""
    reasoning, content, calls, finish = "", "", [], ""
    async with mesh.client() as client:
        body: Any = {"model": "demo", "messages": USER, "stream": True, **fields}
        async for chunk in await client.chat.completions.create(**body):
            (choice,) = chunk.choices
            delta, finish = choice.delta, choice.finish_reason or finish
            reasoning += getattr(delta, "reasoning", None) or ""
            content += delta.content or ""
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.type == "function"
                    calls.append((call.id, call.function.name, ""))
                at = calls[call.index]
                calls[call.index] = (*at[:2], at[2] + (call.function.arguments or ""))
    return reasoning, content, calls, finish


@pytest.mark.asyncio
@pytest.mark.parametrize("parser", sorted(ANSWERS))
async def test_the_model_decides_to_call(checkpoint: Path, parser: str) -> None:
    content = "" if parser == "llama3_json" else "Let me look."
    async with saying(checkpoint, ANSWERS[parser], tool_call_parser=parser) as mesh:
        choice = await whole(mesh, tools=[WEATHER, NOW])
        assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", content)
        named = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert named == CALLS
        _, text, calls, finish = await streamed(mesh, tools=[WEATHER, NOW])
        assert (finish, text) == ("tool_calls", content)
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == CALLS
        assert len({call_id for call_id, _, _ in calls}) == 2
        _, _, calls, _ = await streamed(mesh, tools=[WEATHER, NOW], parallel_tool_calls=False)
        assert [name for _, name, _ in calls] == ["weather"]
        choice = await whole(mesh, tools=[WEATHER, NOW], tool_choice="none")
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
        assert choice.message.content == ANSWERS[parser], "not to be called means not to be looked for"
        assert "[weather][now]" in mesh.text.decode(mesh.worker.received[0].prompt_token_ids)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["byte-level", "metaspace"])
async def test_tags_may_be_special_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = byte_level() if kind == "byte-level" else metaspace()
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (*tags, "<|other|>")])
    write_checkpoint(tmp_path, tokenizer, TEMPLATE)
    said = 'hm</think>Well.<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    async with saying(tmp_path, said, tool_call_parser="hermes", reasoning_parser="deepseek_r1") as mesh:
        reasoning, content, calls, _ = await streamed(mesh, tools=[NOW])
        assert (reasoning.strip(), content.strip(), [name for _, name, _ in calls]) == ("hm", "Well.", ["now"])
    if kind == "byte-level":
        async with saying(tmp_path, f"<|other|>{said}", tool_call_parser="hermes") as mesh:
            _, content, calls, _ = await streamed(mesh, tools=[NOW])
            assert (content, len(calls)) == ("hmWell.", 1), "other special tokens stay hidden"


@pytest.mark.asyncio
async def test_a_call_can_be_made_sure_of(checkpoint: Path) -> None:
    said = '[{"name": "weather", "parameters": {"city": "Bergen"}}, {"name": "now", "parameters": {}}]'
    async with saying(checkpoint, said) as mesh:
        choice = await whole(mesh, tools=[WEATHER, NOW], tool_choice="required")
        assert choice.finish_reason == "tool_calls"
        assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
        schema = json.loads(mesh.worker.received[-1].sampling.structured_outputs)["json"]
        jsonschema.validate(json.loads(said), schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{"name": "weather", "parameters": {}}], schema)
        await whole(mesh, tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False)
        schema = json.loads(mesh.worker.received[-1].sampling.structured_outputs)["json"]
        assert schema["maxItems"] == 1
    async with saying(checkpoint, '{"city": "Bergen"}') as mesh:
        named = {"type": "function", "function": {"name": "weather"}}
        choice = await whole(mesh, tools=[WEATHER, NOW], tool_choice=named)
        assert choice.finish_reason == "stop", "as OpenAI says it where the client has named the function"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Bergen"}')
        schema = json.loads(mesh.worker.received[-1].sampling.structured_outputs)["json"]
        assert schema == WEATHER["function"]["parameters"]


@pytest.mark.asyncio
async def test_without_a_parser_the_model_is_not_left_to_decide(checkpoint: Path) -> None:
    async with saying(checkpoint, "hello") as mesh:
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            await whole(mesh, tools=[WEATHER])


@pytest.mark.asyncio
async def test_tools_have_the_template_that_is_for_them(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, byte_level(), "")
    forms = [{"name": "default", "template": CHAT_TEMPLATE}, {"name": "tool_use", "template": "T" + TEMPLATE}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": forms}))
    async with saying(tmp_path, "Hm") as mesh:
        for fields, begins in (({}, "<|user|>Weather?"), ({"tools": [NOW], "tool_choice": "none"}, "T[now]")):
            await whole(mesh, **fields)
            prompt = mesh.text.decode(list(mesh.worker.received[-1].prompt_token_ids), skip_special_tokens=False)
            assert prompt.startswith(begins)


async def test_a_template_without_a_place_for_tools_takes_them_and_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    named = {"type": "function", "function": {"name": "now"}}
    async with saying(tmp_path, "Hm", tool_call_parser="hermes") as mesh, mesh.http() as http:
        prompts, told = set[tuple[int, ...]](), list[str | None]()
        strict = {"type": "function", "function": {**NOW["function"], "strict": True}}
        asked: list[dict[str, Any]] = [{}, {"tools": [strict]}, {"tools": [strict], "tool_choice": "none"}]
        asked += [{"tools": [NOW], "tool_choice": choice} for choice in ("auto", "none", "required", named)]
        for fields in asked:
            answer = await http.post("/v1/chat/completions", json={"model": "demo", "messages": USER, **fields})
            assert answer.status_code == 200, answer.text
            prompts.add(tuple(mesh.worker.received[-1].prompt_token_ids))
            told.append(answer.headers.get("x-penstock-without-effect"))
    assert len(prompts) == 1
    shaped = "a call that is made sure of, or checked because its tool is strict, fits its schema all the same"
    assert told == [None, None, "tools", "tools", "tools", None, None], shaped


async def test_earlier_calls_are_told_to_the_template_as_objects(checkpoint: Path) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns: Any = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    async with saying(checkpoint, "It rains.", tool_call_parser="hermes") as mesh:
        choice = await whole(mesh, messages=turns, tools=[WEATHER])
        assert choice.message.content == "It rains."
        assert "(Oslo)<|tool|>rain" in mesh.text.decode(mesh.worker.received[-1].prompt_token_ids)


@pytest.mark.parametrize("arguments", ['{"city": "Os', '["Oslo"]', "", None, {"city": "Oslo"}])
async def test_a_conversation_goes_on_after_a_call_that_was_no_json(checkpoint: Path, arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns: Any = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "wrong"}]
    async with saying(checkpoint, "Hm", tool_call_parser="hermes") as mesh, mesh.http() as http:
        answer = await http.post("/v1/chat/completions", json={"model": "demo", "messages": turns})
        assert answer.status_code == 200, answer.text
        told = "(Oslo)" if isinstance(arguments, dict) else "()"
        assert f"{told}<|tool|>wrong" in mesh.text.decode(mesh.worker.received[-1].prompt_token_ids)


@pytest.mark.asyncio
async def test_reasoning_is_told_apart(checkpoint: Path) -> None:
    said = "<think>It\nmay rain.</think>\n\nTake an umbrella."
    async with saying(checkpoint, said, reasoning_parser="deepseek_r1") as mesh:
        choice = await whole(mesh)
        assert choice.message.model_extra["reasoning"] == "It\nmay rain."
        assert choice.message.content == "\n\nTake an umbrella."
        assert (await streamed(mesh))[:2] == ("It\nmay rain.", "\n\nTake an umbrella.")
        hidden = await whole(mesh, extra_body={"include_reasoning": False})
        assert hidden.message.model_extra["reasoning"] is None
        assert hidden.message.content == "\n\nTake an umbrella."
        closed: Any = [*USER, {"role": "assistant", "content": "<think></think>"}]
        assert (await streamed(mesh, messages=closed))[0] == "", "the prompt has closed the reasoning"


@pytest.mark.asyncio
@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
async def test_the_usage_counts_the_tokens_of_the_reasoning(checkpoint: Path, parser: str) -> None:
    said = "It\nmay rain.</think>Take an umbrella."
    asked: Any = {"model": "demo", "messages": USER}
    async with saying(checkpoint, said, reasoning_parser=parser) as mesh, mesh.client() as client:
        expected = len(mesh.ids("It\nmay rain."))
        answer = await client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == expected
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        counts = []
        async for chunk in await client.chat.completions.create(**asked, n=2, stream=True, stream_options=options):
            assert chunk.usage is not None
            assert chunk.usage.completion_tokens_details is not None
            counts.append(chunk.usage.completion_tokens_details.reasoning_tokens)
        assert (counts[:2], counts[-1]) == ([0, 0], 2 * expected)
        assert max(counts[:-1]) == expected, "of one choice"
        closed: Any = [*USER, {"role": "assistant", "content": "<think></think>"}]
        answer = await client.chat.completions.create(model="demo", messages=closed)
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        completion = await client.completions.create(model="demo", prompt="hi")
        assert completion.usage is not None
        assert completion.usage.completion_tokens_details is None
    async with saying(checkpoint, said) as mesh, mesh.client() as client:
        answer = await client.chat.completions.create(**asked)
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is None


@pytest.mark.asyncio
async def test_a_budget_of_the_reasoning_reaches_the_engine(checkpoint: Path) -> None:
    async with saying(checkpoint, "hm</think>It rains.", reasoning_parser="qwen3") as mesh, mesh.http() as http:
        for path, fields, budget in (
            ("chat/completions", {"thinking_token_budget": 9}, 9),
            ("chat/completions", {"thinking_token_budget": 0}, 0),
            ("chat/completions", {"thinking_token_budget": -1}, None),
            ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
            ("messages", {"thinking": {"type": "adaptive"}}, None),
        ):
            answer = await http.post(
                f"/v1/{path}", json={"model": "demo", "messages": USER, "max_tokens": 2000, **fields}
            )
            assert answer.status_code == 200, answer.text
            sampling = mesh.worker.received[-1].sampling
            told = sampling.thinking_token_budget if sampling.HasField("thinking_token_budget") else None
            assert told == budget, fields


@pytest.mark.asyncio
@pytest.mark.parametrize("is_strict", [False, True])
async def test_a_system_amid_a_message_s_turns_is_put_where_the_template_takes_it(
    tmp_path: Path, is_strict: bool
) -> None:
    strict = "{% if messages[-2].role == 'system' %}{{ raise_exception('the system begins') }}{% endif %}"
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    checkpoint = write_checkpoint(tmp_path, byte_level(), f"{strict}{template}" if is_strict else template)
    turns = [{"role": role, "content": role[0]} for role in ("user", "system", "user")]
    body = {"model": "demo", "system": "S", "messages": turns, "max_tokens": 9}
    async with saying(checkpoint, "It rains.") as mesh, mesh.http() as http:
        answer = await http.post("/v1/messages", json=body)
        assert answer.status_code == 200, answer.text
        prompt = mesh.text.decode(mesh.worker.received[-1].prompt_token_ids)
        assert prompt == ("<system>Ss<user>u<user>u" if is_strict else "<system>S<user>u<system>s<user>u")
        counted = (await http.post("/v1/messages/count_tokens", json=body)).json()
        assert counted["input_tokens"] == len(mesh.worker.received[-1].prompt_token_ids)


@pytest.mark.asyncio
async def test_reasoning_before_a_call_under_a_grammar(checkpoint: Path) -> None:
    said = 'hm</think>[{"name": "now", "parameters": {}}]'
    async with saying(checkpoint, said, reasoning_parser="qwen3") as mesh:
        reasoning, content, calls, finish = await streamed(mesh, tools=[NOW], tool_choice="required")
        assert (reasoning, content, finish) == ("hm", "", "tool_calls")
        assert [(name, arguments) for _, name, arguments in calls] == [("now", "{}")]


@pytest.mark.asyncio
async def test_a_strict_tool_that_the_model_may_call_is_enforced(checkpoint: Path) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with saying(checkpoint, ANSWERS["hermes"], tool_call_parser="hermes") as mesh:
        await whole(mesh, tools=[strict, NOW])
        structure = json.loads(mesh.worker.received[-1].sampling.structured_outputs)
        tags = json.loads(structure["structural_tag"])["format"]
        assert (tags["type"], tags["triggers"]) == ("triggered_tags", ["<tool_call>"])
        schemas = [tag["content"]["json_schema"] for tag in tags["tags"]]
        assert schemas == [WEATHER["function"]["parameters"]] * 2 + [True] * 2, "two ways to write each call"
        await whole(mesh, tools=[WEATHER, NOW])
        assert not mesh.worker.received[-1].sampling.structured_outputs, "no tool is strict"
        form: Any = {"type": "json_object"}
        await whole(mesh, tools=[strict], response_format=form)
        assert json.loads(mesh.worker.received[-1].sampling.structured_outputs) == {"json_object": True}


def test_workers_know_the_parsers_that_frontends_have() -> None:
    assert set(FRONTENDS_TOOL_PARSERS) == set(TOOL_PARSERS)
    assert set(FRONTENDS_REASONING_PARSERS) == set(REASONING_PARSERS)
