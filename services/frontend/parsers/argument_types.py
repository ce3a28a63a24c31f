"""Arguments that a model writes as bare text, as values of the types that the tool declares."""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final

_OTHER_NAMES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "uint32", "uint64", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    "bool": "boolean",
    "dict": "object",
    **dict.fromkeys(("arr", "list", "sequence"), "array"),
}
"""Types that tools are declared with, though JSON Schema has no such; vLLM takes them as well."""


def types_of(schema: Any) -> frozenset[str]:
    """The JSON types that a schema lets a value have; `string` where it says nothing of them."""
    return frozenset(_types_of(schema)) or frozenset(("string",))


def _types_of(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return {"string"}
    declared = schema.get("type", ())
    listed = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    types = {_OTHER_NAMES.get(name.strip().lower(), name.strip().lower()) for name in listed if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        types |= {_type_of(value) for value in schema["enum"]}
    for choice in ("anyOf", "oneOf", "allOf"):
        for alternative in schema[choice] if isinstance(schema.get(choice), list) else ():
            types |= _types_of(alternative) or {"string"}
    return types


def typed(text: str, types: frozenset[str]) -> Any:
    """The value that the text stands for: of the most special type that it can be read as, else the text itself."""
    for name, read in _READERS:
        if name in types:
            try:
                return read(text)
            except (ValueError, OverflowError, RecursionError):
                continue
    if "string" in types:
        return text
    try:  # of none of the types that are declared
        return _finite_json(text)
    except (ValueError, RecursionError):
        return text


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    kinds: list[tuple[type, str]] = [(bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")]
    return next(
        (name for kind, name in kinds if isinstance(value, kind)), "array" if isinstance(value, list) else "object"
    )


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError(text)


def _number(text: str) -> float | int:
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return int(value) if value == int(value) else value


def _boolean(text: str) -> bool:
    try:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower().strip()]
    except KeyError:
        raise ValueError(text) from None


def _finite_json(text: str) -> Any:
    """JSON that can be written again: without infinities and NaN, which JSON does not know."""
    value = json.loads(text)
    json.dumps(value, allow_nan=False)
    return value


_READERS: Final[tuple[tuple[str, Callable[[str], Any]], ...]] = (
    ("null", _null),
    ("integer", int),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _finite_json),
    ("array", _finite_json),
)
"""In the order in which they are tried."""
