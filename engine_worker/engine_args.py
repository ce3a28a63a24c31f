"""NAME=VALUE arguments made into an engine's settings dataclass. Pure."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mesh.errors import ConfigurationError

Settings = TypeVar("Settings")
Tree = dict[str, Any]


def engine_settings(
    cls: type[Settings], arguments: Sequence[str], defaults: Mapping[str, Any], *, others: str = ""
) -> Settings:
    """Settings from `arguments` such as "kv_blocks=512" or, for a dataclass within, "cost.fixed_ms=2", on top of
    `defaults`. `others`: the field that holds what `cls` has no field for, as a tuple of NAME=VALUE.

    Raises ConfigurationError for wrong values, and for unknown names where there is no such field."""
    tree = dict(defaults)
    unknown: list[str] = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"engine argument {argument!r} is not of the form NAME=VALUE")
        path = name.lstrip("-").replace("-", "_").split(".")
        if others and (path[0] not in typing.get_type_hints(cls) or path == [others]):
            unknown.append(f"{'.'.join(path)}={value}")
        else:
            _place(tree, cls, path, value, argument)
    if unknown:
        tree[others] = tuple(unknown)
    try:
        return msgspec.convert(tree, cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"engine arguments {' '.join(arguments)}: {error}") from error


def _place(tree: Tree, cls: Any, path: list[str], value: str, argument: str) -> None:
    """Put a value into the tree at `path`, if `cls` has such a field."""
    fields = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    first, *rest = path
    if first not in fields or bool(rest) != dataclasses.is_dataclass(fields[first]):
        known = ", ".join(f"{name}.*" if dataclasses.is_dataclass(kind) else name for name, kind in fields.items())
        raise ConfigurationError(f"engine argument {argument!r}: {first!r} is not a setting here; there are {known}")
    if rest:
        tree[first] = dict(tree.get(first, {}))
        _place(tree[first], fields[first], rest, value, argument)
    else:
        tree[first] = value
