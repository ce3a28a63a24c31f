"""NAME=VALUE options made into an engine's settings dataclass. Pure."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from mesh.errors import ConfigurationError

Settings = TypeVar("Settings")
Tree = dict[str, Any]


def engine_settings(cls: type[Settings], options: Sequence[str], defaults: Mapping[str, Any]) -> Settings:
    """Settings from `options` such as "kv_blocks=512" or, for a dataclass within, "cost.fixed_ms=2", on top of
    `defaults`. Raises ConfigurationError for unknown names and wrong values."""
    tree = dict(defaults)
    for option in options:
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ConfigurationError(f"engine option {option!r} is not of the form NAME=VALUE")
        _place(tree, cls, name.replace("-", "_").split("."), value, option)
    try:
        return msgspec.convert(tree, cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"engine options {' '.join(options)}: {error}") from error


def _place(tree: Tree, cls: Any, path: list[str], value: str, option: str) -> None:
    """Put a value into the tree at `path`, if `cls` has such a field."""
    fields = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    first, *rest = path
    if first not in fields or bool(rest) != dataclasses.is_dataclass(fields[first]):
        known = ", ".join(f"{name}.*" if dataclasses.is_dataclass(kind) else name for name, kind in fields.items())
        raise ConfigurationError(f"engine option {option!r}: {first!r} is not a setting here; there are {known}")
    if rest:
        tree[first] = dict(tree.get(first, {}))
        _place(tree[first], fields[first], rest, value, option)
    else:
        tree[first] = value
