"""Tools that a chat may call: what the prompt, the grammar and the reader of the answer are told of them."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from services.frontend.errors import bad_request
from services.frontend.requests.structure import check_schema, json_structure

MAX_TOOLS: Final = 256
Name = Annotated[str, Meta(min_length=1, max_length=128, pattern=r'^[^"\\\x00-\x1f]+$')]


class Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; left out: there are none."""
    strict: bool | None = None
    """Its arguments fit `parameters` although the model decides whether to call it. Where `tool_choice` makes a call
    sure, they do so either way."""
    defer_loading: bool | None = None
    """For chat templates that leave such tools out of the prompt until they are asked for."""


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a model may use; only functions can be served."""

    type: Literal["function"]
    function: Function
    defer_loading: bool | None = None
    """The function's, if that does not say it."""


class NamedFunction(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The function that is to be called."""

    name: Name


class NamedToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Have the model call this one."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]


def check_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raises ApiError (400, `param` set) for what contradicts itself."""
    names = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise bad_request(f"Two tools are called `{tool.function.name}`.", f"tools[{index}].function.name")
        names.add(tool.function.name)
        if tool.function.parameters is not None:
            check_schema(tool.function.parameters, f"tools[{index}].function.parameters")
    if choice is None or choice == "none":
        return
    if not tools:
        raise bad_request("`tool_choice` needs `tools`.", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        raise bad_request(f"There is no tool `{choice.function.name}` among `tools`.", "tool_choice")


def effective_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> ToolChoice:
    """With tools the model is free to call them unless the client says otherwise."""
    return choice or ("auto" if tools else "none")


def calls_structure(tools: Sequence[Tool], choice: ToolChoice, *, is_parallel: bool) -> str:
    """What makes sure of a call: the arguments of the named function, or an array of calls. Empty where the model is
    free. Raises ApiError (400) for schemas that cannot stand together."""
    if isinstance(choice, NamedToolChoice):
        named = next(tool.function for tool in tools if tool.function.name == choice.function.name)
        return json_structure(_parameters(named), "tools")
    if choice != "required":
        return ""
    shared: dict[str, Any] = {}
    calls = [_call(tool.function, shared) for tool in tools]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if not is_parallel:
        schema["maxItems"] = 1
    if shared:
        schema["$defs"] = shared
    return json_structure(schema, "tools")


def argument_schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """Of the parameters of each tool, by the tool's name and the parameter's."""
    schemas = ((tool.function.name, (tool.function.parameters or {}).get("properties")) for tool in tools)
    return {name: properties if isinstance(properties, dict) else {} for name, properties in schemas}


_TOLD_TO_PARSERS: Final = (
    *("tools", "tool_choice", "parallel_tool_calls", "response_format", "structured_outputs", "include_reasoning"),
    *("skip_special_tokens", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt", "stream"),
    *("continue_final_message", "documents", "n", "stop"),
)
"""Parameters that vLLM's parsers look at, or may pass on to their own templates."""


def parser_body(request: msgspec.Struct) -> str:
    """The body of a chat as vLLM's parsers are told of it."""
    given = {name: getattr(request, name) for name in _TOLD_TO_PARSERS if getattr(request, name) is not None}
    return msgspec.json.encode({"model": "", **given}).decode()


def earlier_calls(messages: Sequence[Mapping[str, Any]]) -> int:
    """Calls of tools in a conversation."""
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def for_template(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """As chat templates know them; None if there are none, which templates ask for. What a tool leaves out is null, as
    in vLLM, so that the prompt is the same."""
    return [_tool_for_template(tool) for tool in tools] or None


def _tool_for_template(tool: Tool) -> dict[str, Any]:
    function = tool.function
    told: dict[str, Any] = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters,
    }
    if function.strict is not None:
        told["strict"] = function.strict
    defers = tool.defer_loading if function.defer_loading is None else function.defer_loading
    if defers is not None:
        told["defer_loading"] = defers
    of_tool = {} if tool.defer_loading is None else {"defer_loading": tool.defer_loading}
    return {"type": "function", "function": told, **of_tool}


def calls_for_template(calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An assistant's earlier calls with their arguments as objects, which templates write in the model's own form."""
    listed = []
    for call in calls:
        function = dict(call["function"])
        arguments = _arguments(function.pop("arguments", None))
        listed.append({**call, "function": {"arguments": arguments, **function}})  # in vLLM's order
    return listed


def _arguments(arguments: Any) -> dict[str, Any]:
    """Those of a call; no arguments where they are no JSON object, as in vLLM. A model has written them, often to the
    end of its tokens, and a conversation that holds such a call could never go on."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _parameters(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _call(function: Function, shared: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call; the parameters' definitions go to `shared`, since references begin at the root."""
    parameters = dict(_parameters(function))
    for name, definition in parameters.pop("$defs", {}).items():
        if shared.setdefault(name, definition) != definition:
            raise bad_request(f"Two tools define `$defs.{name}` differently; give it two names.", "tools")
    return {
        "type": "object",
        "properties": {"name": {"enum": [function.name]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
