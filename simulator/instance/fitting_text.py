"""Text of a given form: what a simulated engine says where a request asks for JSON or for one of some texts.

A function of (form, key) alone, as all that a simulated engine says. Regular expressions and grammars are left to real
engines: `NotSimulated` says so.
"""

import json
from typing import Any, Final

from simulator.instance.splitmix import stream_words

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz "
_MAX_DEPTH: Final = 32
_MORE_ITEMS: Final = 3
"""Than there must be."""
_USUAL_CHARACTERS: Final = 12
_USUAL_SPAN: Final = 1000
"""Of numbers."""
_ANNOTATIONS: Final = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"))
_KEYWORDS: Final = _ANNOTATIONS | frozenset(
    (
        "$schema $id $comment $defs definitions $ref type const enum anyOf oneOf properties required "
        "additionalProperties items prefixItems minItems maxItems minLength maxLength minimum maximum "
        "exclusiveMinimum exclusiveMaximum multipleOf"
    ).split()
)


class NotSimulated(Exception):
    """A simulated engine has no text of this form; says why."""


def fitting_text(structure: str, key: int) -> str:
    """A text that fits, drawn from `key`. `structure`: as in `SamplingParams`. Raises NotSimulated."""
    asked = json.loads(structure)
    draw = _Draw(key)
    if "choice" in asked:
        return str(asked["choice"][draw.below(len(asked["choice"]))])
    if "json_object" in asked:
        return json.dumps({draw.word(1, 8): draw.word(1, _USUAL_CHARACTERS)}, separators=(",", ":"))
    if "json" in asked:
        schema = json.loads(asked["json"]) if isinstance(asked["json"], str) else asked["json"]
        return json.dumps(_Values(schema, draw).value(schema, 0), separators=(",", ":"))
    raise NotSimulated(f"it makes JSON and choices, not {', '.join(asked)}")


def leaves_text_free(structure: str) -> bool:
    """Whether any text fits that begins none of some tags: what a model may say that has tools and need not call
    any."""
    tag = json.loads(structure).get("structural_tag")
    form = json.loads(tag).get("format", {}) if isinstance(tag, str) else {}
    return isinstance(form, dict) and form.get("type") == "triggered_tags" and not form.get("at_least_one")


class _Draw:
    """A random stream that is read word by word."""

    def __init__(self, key: int) -> None:
        self._key = key
        self._read = 0

    def below(self, count: int) -> int:
        """0 to count - 1."""
        self._read += 1
        return int(stream_words(self._key, self._read, 1)[0]) % count

    def between(self, low: int, high: int) -> int:
        """Both included."""
        return low + self.below(high - low + 1)

    def word(self, shortest: int, longest: int) -> str:
        """Letters and blanks."""
        return "".join(_LETTERS[self.below(len(_LETTERS))] for _ in range(self.between(shortest, longest)))


class _Values:
    """Values that fit the parts of one schema."""

    def __init__(self, root: dict[str, Any], draw: _Draw) -> None:
        self._root = root
        self._draw = draw

    def value(self, schema: Any, depth: int) -> Any:
        if schema is True or schema == {}:
            return self._draw.word(1, _USUAL_CHARACTERS)
        if not isinstance(schema, dict):
            raise NotSimulated("nothing fits the schema `false`")
        if depth > _MAX_DEPTH:
            raise NotSimulated("a schema nests deeper than it can follow")
        if unknown := schema.keys() - _KEYWORDS:
            raise NotSimulated(f"it does not know {', '.join(sorted(unknown))} of JSON Schema")
        if "$ref" in schema:
            return self.value(self._referred(schema["$ref"]), depth + 1)
        if "const" in schema:
            return schema["const"]
        for choices in ("enum", "anyOf", "oneOf"):
            if choices in schema:
                chosen = schema[choices][self._draw.below(len(schema[choices]))]
                return chosen if choices == "enum" else self.value(chosen, depth + 1)
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        kinds = schema.get("type", "object" if "properties" in schema else "string")
        match kinds[self._draw.below(len(kinds))] if isinstance(kinds, list) else kinds:
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string":
                low = schema.get("minLength", 0)
                usual = low + _USUAL_CHARACTERS
                return self._draw.word(low, min(schema.get("maxLength", usual), usual))
            case "integer":
                return self._integer(schema)
            case "number":
                return self._number(schema)
            case "boolean":
                return self._draw.below(2) == 1
            case "null":
                return None
            case other:
                raise NotSimulated(f"there is no type {other!r} in JSON Schema")

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        members, required = schema.get("properties", {}), schema.get("required", ())
        names = [name for name in members if name in required or (depth < 3 and self._draw.below(2))]
        names += [name for name in required if name not in members]
        others = schema.get("additionalProperties", True)
        return {name: self.value(members.get(name, others), depth + 1) for name in names}

    def _array(self, schema: dict[str, Any], depth: int) -> list[Any]:
        first, others = schema.get("prefixItems", []), schema.get("items", True)
        low = schema.get("minItems", 0)
        high = min(schema.get("maxItems", low + _MORE_ITEMS), low + _MORE_ITEMS)
        items = [first[index] if index < len(first) else others for index in range(self._draw.between(low, high))]
        return [self.value(item, depth + 1) for item in items]

    def _integer(self, schema: dict[str, Any]) -> int:
        step = schema.get("multipleOf", 1)
        low, high = _bounds(schema, 1)
        first, last = -(-low // step), high // step
        if first > last or step != int(step):
            raise NotSimulated("it finds no integer for a schema")
        return int(self._draw.between(int(first), int(last)) * step)

    def _number(self, schema: dict[str, Any]) -> float:
        if "multipleOf" in schema:
            return self._integer(schema)
        low, high = _bounds(schema, 1e-6)
        if low > high:
            raise NotSimulated("it finds no number for a schema")
        return float(round(low + (high - low) * self._draw.below(1000) / 1000, 6))

    def _referred(self, reference: str) -> Any:
        if not reference.startswith("#"):
            raise NotSimulated("a schema refers to another document")
        found: Any = self._root
        for step in reference[1:].split("/")[1:]:
            try:
                found = found[step.replace("~1", "/").replace("~0", "~")]
            except (KeyError, TypeError):
                raise NotSimulated(f"a schema refers to {reference}, which is not there") from None
        return found


def _bounds(schema: dict[str, Any], off: float) -> tuple[float, float]:
    """Both included; `off`: how far to stay from what is excluded."""
    lows = [schema[name] + by for name, by in (("minimum", 0), ("exclusiveMinimum", off)) if name in schema]
    highs = [schema[name] - by for name, by in (("maximum", 0), ("exclusiveMaximum", off)) if name in schema]
    low, high = max(lows, default=None), min(highs, default=None)
    if low is None:
        low = 0 if high is None else min(0, high - _USUAL_SPAN)
    return low, low + _USUAL_SPAN if high is None else high
