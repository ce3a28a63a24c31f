"""Messages to a prompt, by the template that came with the model.

Templates are Jinja (the form that transformers established) and run in a sandbox: a model directory is data,
not code to be trusted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesh.errors import ConfigurationError


class ChatTemplateRefused(Exception):
    """The template cannot make a prompt of these messages; says why, for the client."""


TAKEN: Final = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
"""Variables that say what the request's own parameters say: no `chat_template_kwargs` may."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""Of reasoning, as Anthropic's clients name them."""
_END_OF_FINAL_MESSAGE: Final = "\ue000penstock-end-of-final-message\ue001"
"""Stands behind the text that is to be continued, to be found again whatever the template makes of blanks; characters
of the private use area, which no template looks for."""


def effort_variables(effort: str) -> dict[str, Any]:
    """What a request's `reasoning_effort` is to a template."""
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


class ChatTemplate:
    """One model's template, compiled once."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        unix_time: Callable[[], float],
    ) -> None:
        """`special_tokens` (bos_token, eos_token ...) are variables of the template; `strftime_now`
        formats `unix_time` in this machine's time zone. Raises ConfigurationError for a template that cannot be
        compiled."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.fromtimestamp(unix_time()).strftime(form)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self.takes_parts = _goes_through_parts(tree)
            """Whether it goes through the parts of a message by itself; if not, it wants their text."""
            self.knows_tools = "tools" in meta.find_undeclared_variables(tree)
            """Whether a prompt tells the model of the tools that it may call."""
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"the chat template is no valid Jinja (line {error.lineno}): {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt; with `add_generation_prompt`, up to where the assistant's answer begins. `variables` of the
        request go before the special tokens. Raises ChatTemplateRefused."""
        try:
            return self._template.render(
                {
                    "tools": None,
                    **self._special_tokens,
                    **variables,
                    "messages": messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except ChatTemplateRefused:
            raise
        # A template is a program from elsewhere: what it raises on odd messages (TypeError, RecursionError ...) says
        # that these messages do not fit it.
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            RecursionError,
        ) as e:
            raise ChatTemplateRefused(f"the model's chat template does not take these messages: {e}") from e

    @cached_property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` by which a model is asked not to reason: `none`; `low` where the template refuses that
        or writes for it what it writes for another effort (vLLM's reading)."""
        told = [self._asked_with(effort) for effort in ("none", *EFFORTS)]
        return "low" if told[0] is None or told[0] in told[1:] else "none"

    def _asked_with(self, effort: str) -> str | None:
        try:
            return self.render([{"role": "user", "content": "Hi"}], variables=effort_variables(effort))
        except ChatTemplateRefused:
            return None

    def render_unfinished(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """The prompt up to the end of the last message's text, for the model to go on with it. Raises
        ChatTemplateRefused, also where that text does not appear."""
        final = messages[-1]
        marked = {**final, "content": _marked(final["content"])}
        text = self.render([*messages[:-1], marked], add_generation_prompt=False, variables=variables)
        before, mark, _ = text.partition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise ChatTemplateRefused("the model's chat template does not show the final message, so none can go on")
        return before


def _marked(content: Any) -> Any:
    """A message's text, or its parts, with the mark at its end."""
    if not isinstance(content, list):
        return f"{content}{_END_OF_FINAL_MESSAGE}"
    if content and content[-1].get("type") == "text":
        return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END_OF_FINAL_MESSAGE}"}]
    return [*content, {"type": "text", "text": _END_OF_FINAL_MESSAGE}]


def _goes_through_parts(tree: nodes.Template) -> bool:
    """Whether a template loops over a message's content, by itself or in a macro that it gives it to. vLLM looks the
    same up in a roundabout way (`_detect_content_format`)."""
    macros = {macro.name: [argument.name for argument in macro.args] for macro in tree.find_all(nodes.Macro)}
    given: set[str] = set()
    for call in tree.find_all(nodes.Call):
        names = macros.get(call.node.name, []) if isinstance(call.node, nodes.Name) else []
        given.update(name for name, value in zip(names, call.args, strict=False) if _is_content(value))
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return any(_is_content(each) or (isinstance(each, nodes.Name) and each.name in given) for each in loops)


def _is_content(node: nodes.Node) -> bool:
    """`message.content`, `message["content"]`, or what a template has put into `content`."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getattr(attr="content") | nodes.Name(name="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateRefused(f"the model's chat template refused the messages: {message}")


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own: no HTML escapes, as templates expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
