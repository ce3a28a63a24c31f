"""Calls that the model decides on (`tool_choice: auto`), made to fit their schemas where a tool is `strict`.

Engines are told structural tags: the text is free until a call begins, and from there on it is a call of one of the
tools. As in vLLM one strict tool has all calls checked for their form, and the arguments of the strict ones for their
schemas. The tags are those of vLLM and xgrammar (tests/vllm/test_strict_tools.py compares them).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from services.frontend.requests.structure import encoded_structure
from services.frontend.requests.tools import Function, Tool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes a call, for a grammar."""

    trigger: str
    """What the beginnings have in common: behind it the text is a call."""
    ends: tuple[tuple[Callable[[str], str], str], ...]
    """Ways to write one: what stands before the arguments of a tool by its name, and what behind."""
    style: str = "json"


_HERMES: Final = CallFormat(
    "<tool_call>",
    (
        (lambda name: f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"),
        (lambda name: f'<tool_call>{{"name": "{name}", "arguments": ', "}</tool_call>"),
    ),
)
_LLAMA: Final = CallFormat('{"name": ', ((lambda name: f'{{"name": "{name}", "parameters": ', "}"),))
_QWEN_XML: Final = CallFormat(
    "<tool_call>\n<function=",
    ((lambda name: f"<tool_call>\n<function={name}>\n", "\n</function>\n</tool_call>"),),
    "qwen_xml",
)
CALL_FORMATS: Final[Mapping[str, CallFormat]] = MappingProxyType(
    {
        "hermes": _HERMES,
        **dict.fromkeys(("llama3_json", "llama4_json"), _LLAMA),
        **dict.fromkeys(("qwen3_coder", "qwen3_xml"), _QWEN_XML),
    }
)
"""By the names of the tool parsers that frontends have."""


def keeps_strict(tools: Sequence[Tool], tool_parser: str) -> bool:
    """Whether calls are made to fit, because a tool is strict."""
    return tool_parser in CALL_FORMATS and any(tool.function.strict for tool in tools)


def strict_structure(tools: Sequence[Tool], tool_parser: str) -> str:
    """What engines are told; empty: no tool is strict. Raises ApiError (400) if it is too long."""
    if not keeps_strict(tools, tool_parser):
        return ""
    form = CALL_FORMATS[tool_parser]
    tags = [
        {"type": "tag", "begin": begin(tool.function.name), "content": _content(tool.function, form), "end": end}
        for tool in tools
        for begin, end in form.ends
    ]
    triggered = {"type": "triggered_tags", "triggers": [form.trigger], "tags": tags}
    structure = {"type": "structural_tag", "format": triggered}
    return encoded_structure({"structural_tag": json.dumps(structure)}, "tools")


def _content(function: Function, form: CallFormat) -> dict[str, Any]:
    schema: Any = function.parameters if function.strict and function.parameters is not None else True
    return {"type": "json_schema", "json_schema": schema, "style": form.style}
