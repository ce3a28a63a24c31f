"""Tools of OpenAI's Responses as the functions of a chat, and the calls of these as a response names them.

As in vLLM, the functions of a namespace are told to the model as `<namespace>__<name>`, and a custom tool, which takes
any text, as a function of one parameter that is a text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from services.frontend.errors import bad_request

_SEPARATOR: Final = "__"
_INPUT: Final = "input"
"""The parameter of a custom tool's function."""
_CUSTOM_PARAMETERS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "type": "object",
        "properties": {_INPUT: {"type": "string", "description": "The freeform text payload for this tool."}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
)
"""In vLLM's words, so that the prompt is the same."""
_FUNCTION_FIELDS: Final = ("name", "description", "parameters", "strict")
_NAMED: Final = ("function", "custom")

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CalledTool:
    """How a response names the tool that a call is of."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def flat_name(namespace: str, name: str) -> str:
    """The function of a chat that one of a namespace is."""
    return f"{namespace}{_SEPARATOR}{name}"


def _functions(tools: Sequence[Fields]) -> Iterator[tuple[int, dict[str, Any], CalledTool]]:
    """Of each tool that the model can call: its place, the function that it is told, and the tool's own name."""
    for index, tool in enumerate(tools):
        kind, name = tool.get("type"), str(tool.get("name", ""))
        if kind == "function":
            yield index, _function(tool, name), CalledTool(name)
        elif kind == "custom":
            told = {"description": tool.get("description"), "parameters": dict(_CUSTOM_PARAMETERS)}
            yield index, _function(told, name), CalledTool(name, is_custom=True)
        elif kind == "namespace":
            for inner in tool.get("tools") or ():
                if isinstance(inner, dict) and inner.get("type") == "function":
                    local = str(inner.get("name", ""))
                    yield index, _function(inner, flat_name(name, local)), CalledTool(local, name)


def _function(fields: Fields, name: str) -> dict[str, Any]:
    return {key: value for key in _FUNCTION_FIELDS if (value := {**fields, "name": name}.get(key)) is not None}


def chat_tools(tools: Sequence[Fields]) -> list[dict[str, Any]]:
    """The functions that the model is told of. Raises ApiError (400) for a custom tool whose text has a grammar."""
    for index, tool in enumerate(tools):
        form = tool.get("format")
        if tool.get("type") == "custom" and isinstance(form, dict) and form.get("type") == "grammar":
            raise bad_request("A custom tool takes any text here: grammars are not kept.", f"tools[{index}].format")
    return [{"type": "function", "function": function} for _, function, _ in _functions(tools)]


def uncallable(tools: Sequence[Fields]) -> list[int]:
    """The places of tools that the model is not told of, such as those that OpenAI's servers run."""
    callable_places = {index for index, _, _ in _functions(tools)}
    return [index for index in range(len(tools)) if index not in callable_places]


def called_tools(tools: Sequence[Fields]) -> dict[str, CalledTool]:
    """By the name of the function that the model calls."""
    return {function["name"]: tool for _, function, tool in _functions(tools)}


def chat_tool_choice(choice: Any, tools: Sequence[Fields]) -> Any:
    """The chat's `tool_choice`. A function of a namespace may be named without it where one alone has the name. Raises
    ApiError (400) for a name that no tool has, or several have."""
    if not is_named(choice):
        return "auto" if isinstance(choice, dict) else choice
    name, called = choice.get("name"), called_tools(tools)
    local = [flat for flat, tool in called.items() if tool.namespace is not None and tool.name == name]
    found = [name] if name in called else local
    if len(found) > 1:
        raise bad_request(f"`{name}` is in several namespaces: name one of {', '.join(found)}.", "tool_choice")
    if not found:
        raise bad_request(f"There is no tool `{name}` among `tools`.", "tool_choice")
    return {"type": "function", "function": {"name": found[0]}}


def is_named(choice: Any) -> bool:
    """Whether a `tool_choice` names a tool that the model can call."""
    return isinstance(choice, dict) and choice.get("type") in _NAMED


def custom_arguments(text: str) -> str:
    """The arguments by which the function of a custom tool is given a text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def custom_text(arguments: str) -> str:
    """The text that a custom tool is given; the arguments themselves where they are none of its function."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = given.get(_INPUT) if isinstance(given, dict) else None
    return _without_halves(text) if isinstance(text, str) else arguments


def _without_halves(text: str) -> str:
    """With U+FFFD for half a character, which no answer could hold."""
    return _HALVES.sub("\ufffd", text)


_HALVES: Final = re.compile("[\ud800-\udfff]")
_BEFORE_TEXT: Final = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
_WHOLE: Final = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')
"""As much of a JSON text as there is of whole characters."""
_HALF_CHARACTER: Final = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")
"""The first of two escapes that are one character together."""


class CustomTextReader:
    """The text of a custom tool's call, read as its arguments come."""

    def __init__(self) -> None:
        self.text = ""
        """What has been read so far."""
        self._arguments: list[str] = []
        self._left = ""
        """Of the arguments, what is not read yet."""
        self._is_within = False

    def add(self, arguments: str) -> str:
        """What the next piece of the arguments adds to the text."""
        self._arguments.append(arguments)
        self._left += arguments
        if not self._is_within:
            begin = _BEFORE_TEXT.match(self._left)
            if begin is None:
                return ""
            self._is_within, self._left = True, self._left[begin.end() :]
        whole = _WHOLE.match(self._left)
        assert whole is not None, "it may be empty"
        raw = whole[0]
        if half := _HALF_CHARACTER.search(raw):
            raw = raw[: half.start()]
        self._left = self._left[len(raw) :]
        try:
            added = _without_halves(json.loads(f'"{raw}"'))
        except ValueError:  # no JSON: told as it is when all of it is there
            return ""
        self.text += added
        return added

    def end(self) -> str:
        """What the text has besides, now that all arguments are there: all of it again where it is another than what
        was read."""
        read, self.text = self.text, custom_text("".join(self._arguments))
        return self.text[len(read) :] if self.text.startswith(read) else self.text
