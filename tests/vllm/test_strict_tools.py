"""Strict tools that the model may call: our structural tags are vLLM's, and xgrammar takes them."""

import json
from typing import Any

import pytest

from services.frontend.requests.strict_tools import CALL_FORMATS, strict_structure
from services.frontend.requests.tools import Function, Tool

pytestmark = pytest.mark.vllm

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [
    Tool(type="function", function=Function(name="act", parameters=SCHEMA, strict=True)),
    Tool(type="function", function=Function(name="rest", parameters=SCHEMA)),
]


def parts(structural_tag: dict[str, Any]) -> tuple[str, list[str], list[tuple[str, str, str, Any, str]]]:
    form = structural_tag["format"]
    tags = [
        (tag["begin"], tag["end"], tag["content"]["type"], tag["content"]["json_schema"], tag["content"]["style"])
        for tag in form["tags"]
    ]
    return form["type"], form["triggers"], tags


@pytest.mark.parametrize("parser", sorted(CALL_FORMATS))
def test_the_tags_are_those_of_vllm(parser: str) -> None:
    import xgrammar
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers import ToolParserManager
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    ours = json.loads(json.loads(strict_structure(TOOLS, parser))["structural_tag"])
    xgrammar.Grammar.from_structural_tag(json.dumps(ours))
    tools = [
        ChatCompletionToolsParam.model_validate(
            {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": strict}}
        )
        for name, strict in (("act", True), ("rest", None))
    ]
    model = ToolParserManager.get_tool_parser(parser).structural_tag_model
    theirs = get_model_structural_tag(model, tools, "auto", reasoning=False)
    assert theirs is not None
    assert parts(ours) == parts(theirs.model_dump())
