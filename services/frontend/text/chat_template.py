"""Messages to a prompt, by the template that came with the model.

Templates are Jinja (the form that transformers established) and run in a sandbox: a model directory is data,
not code to be trusted.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mesh.errors import ConfigurationError


class ChatTemplateRefused(Exception):
    """The template cannot make a prompt of these messages; says why, for the client."""


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
        except TemplateSyntaxError as error:
            raise ConfigurationError(f"the chat template is no valid Jinja (line {error.lineno}): {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises ChatTemplateRefused."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
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


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateRefused(f"the model's chat template refused the messages: {message}")


def _to_json(value: Any, indent: int | None = None) -> str:
    """Unlike Jinja's own: no HTML escapes, as templates expect."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
