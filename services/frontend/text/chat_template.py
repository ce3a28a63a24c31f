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
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesh.errors import ConfigurationError


class ChatTemplateRefused(Exception):
    """The template cannot make a prompt of these messages; says why, for the client."""


TAKEN: Final = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
"""Variables that say what the request's own parameters say, whatever `chat_template_kwargs` has under their names."""
EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
"""Of reasoning, as Anthropic's clients name them."""
_END_OF_FINAL_MESSAGE: Final = "\ue000penstock-end-of-final-message\ue001"
"""Stands behind the text that is to be continued, to be found again whatever the template makes of blanks; characters
of the private use area, which no template looks for."""
_RAISED_BY_TEMPLATES: Final = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError),
)
"""A template is a program from elsewhere: what it raises on odd messages says that these do not fit it."""
_BLANK: Final = " "
"""Stands behind the mark: gone where the template trims."""


def effort_variables(effort: str) -> dict[str, Any]:
    """What a request's `reasoning_effort` is to a template."""
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


def effort_asking_for_none(with_none: object, with_others: Sequence[object]) -> str:
    """The `reasoning_effort` by which a model is asked not to reason: `none`; `low` where that is refused, or makes the
    same prompt as another effort (vLLM's reading). Takes prompts, None for one that is refused."""
    return "low" if with_none is None or with_none in with_others else "none"


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
        self._source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
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
            self.knows_developers = any(f"{quote}developer{quote}" in source for quote in "'\"")
            """Whether it has words for OpenAI's newer name of the system's role."""
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
        except _RAISED_BY_TEMPLATES as e:
            raise ChatTemplateRefused(f"the model's chat template does not take these messages: {e}") from e

    @cached_property
    def effort_without_thinking(self) -> str:
        """The `reasoning_effort` by which a model is asked not to reason."""
        return effort_asking_for_none(self._asked_with("none"), [self._asked_with(effort) for effort in EFFORTS])

    def _asked_with(self, effort: str) -> str | None:
        try:
            return self.render([{"role": "user", "content": "Hi"}], variables=effort_variables(effort))
        except ChatTemplateRefused:
            return None

    @cached_property
    def wants_system_first(self) -> bool:
        """It takes a system's message at the beginning only. By vLLM's reading (`_detect_merge_inline_system`), so does
        one that needs more than messages to be rendered, such as the token that begins a text."""
        bare = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            bare.from_string(self._source).render(messages=messages, add_generation_prompt=False)
        except _RAISED_BY_TEMPLATES:
            return True
        return False

    def render_unfinished(
        self, messages: Sequence[Mapping[str, Any]], *, variables: Mapping[str, Any] = MappingProxyType({})
    ) -> str:
        """The prompt up to the end of the last message's text, for the model to go on with it. A template that trims
        its messages trims that end, too. Raises ChatTemplateRefused, also where that text does not appear."""
        final = messages[-1]
        marked = {**final, "content": _marked(final["content"])}
        text = self.render([*messages[:-1], marked], add_generation_prompt=False, variables=variables)
        before, mark, behind = text.rpartition(_END_OF_FINAL_MESSAGE)
        if not mark:
            raise ChatTemplateRefused("the model's chat template does not show the final message, so none can go on")
        return before if behind.startswith(_BLANK) else before.rstrip()


class _GenerationTag(Extension):
    """`{% generation %}`, by which templates mark what the assistant said for those who train on it: no part of the
    prompt."""

    tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        parser.stream.skip()
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _marked(content: Any) -> Any:
    """A message's text, or its parts, with the mark at the end of the text. Raises ChatTemplateRefused where there is
    none."""
    mark = _END_OF_FINAL_MESSAGE + _BLANK
    if not isinstance(content, list):
        return f"{content}{mark}"
    for place, part in reversed(list(enumerate(content))):
        if "text" in part:
            return [*content[:place], {**part, "text": f"{part['text']}{mark}"}, *content[place + 1 :]]
    raise ChatTemplateRefused("the final message has no text to go on with")


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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own: no HTML escapes, and the arguments that templates know from transformers."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
