"""Turns a settings dataclass into command-line options, so that each setting is declared and described once."""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union

import click

from services.cli.finite_range import FiniteRange

Settings = TypeVar("Settings")
Command = Callable[..., Any]


def settings_options(cls: type[Any], *, hide: frozenset[str] = frozenset()) -> Callable[[Command], Command]:
    """Decorate a click command with one option for each field of `cls` but those in `hide`.

    A field's docstring becomes its help and its default the option's; a field without a default is required. Numbers
    are finite and not negative, since they count or measure something, and ports are ports.
    Understands bool, int, float, str, Path, Literals, `X | None` and tuples of these; a field that is a
    settings dataclass itself contributes its own fields under their own names.
    """

    def decorate(command: Command) -> Command:
        for option in reversed(_options(cls, hide)):
            command = option(command)
        return command

    return decorate


def settings_from(cls: type[Settings], values: Mapping[str, Any]) -> Settings:
    """The settings that the options of `settings_options(cls)` were given."""
    arguments: dict[str, Any] = {}
    for field, annotation in _fields(cls):
        if dataclasses.is_dataclass(annotation):
            arguments[field.name] = settings_from(typing.cast(type[Any], annotation), values)
        elif field.name in values:
            value = values[field.name]
            arguments[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**arguments)


def _options(cls: type[Any], hide: frozenset[str]) -> list[Callable[[Command], Command]]:
    documentation = _field_docs(cls)
    options: list[Callable[[Command], Command]] = []
    for field, annotation in _fields(cls):
        if field.name in hide:
            continue
        if dataclasses.is_dataclass(annotation):
            options += _options(typing.cast(type[Any], annotation), hide)
        else:
            options.append(_option(field, annotation, documentation.get(field.name, "")))
    return options


def _fields(cls: type[Any]) -> list[tuple[dataclasses.Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _option(field: dataclasses.Field[Any], annotation: Any, help_text: str) -> Callable[[Command], Command]:
    annotation, multiple = _unwrap(annotation)
    flag = "--" + field.name.replace("_", "-")
    attributes: dict[str, Any] = {}
    if annotation is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    else:
        attributes = {"type": _click_type(field.name, annotation), "multiple": multiple}
    if field.default is not dataclasses.MISSING:
        attributes |= {"default": field.default, "show_default": field.default not in (None, "", ())}
    elif field.default_factory is not dataclasses.MISSING:
        attributes |= {"default": field.default_factory()}
    else:
        attributes |= {"required": True}
    return click.option(flag, field.name, help=help_text, **attributes)


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """The type inside `X | None` and `tuple[X, ...]`, and whether it was such a tuple."""
    if typing.get_origin(annotation) in (Union, types.UnionType):
        (annotation,) = (inner for inner in typing.get_args(annotation) if inner is not type(None))
    if typing.get_origin(annotation) is tuple:
        return typing.get_args(annotation)[0], True
    return annotation, False


def _click_type(name: str, annotation: Any) -> Any:
    if annotation is int:
        return click.IntRange(0, 65535 if name == "port" or name.endswith("_port") else None)
    if annotation is float:
        return FiniteRange(min=0)
    if typing.get_origin(annotation) is Literal:
        return click.Choice(typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, str):
        return annotation
    return click.Path(path_type=annotation)


def _field_docs(cls: type[Any]) -> dict[str, str]:
    """The string that stands under each field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(statement, ast.AnnAssign)
            and isinstance(statement.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            docs[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return docs
