"""Answers of `penstock chaos --schema`: a form that models fill with as many tokens as the streams are to have."""

from functools import lru_cache
from typing import Any, Final

import jsonschema
import msgspec

RECORD_TOKENS: Final = 70
"""A record takes so many at most, with a token for each byte; 20 to 40 where the tokenizer knows words."""
_BRACKETS_TOKENS: Final = 8
_RECORD: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["red", "green", "blue"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "on": {"type": "boolean"},
        "tag": {"type": "string", "minLength": 1, "maxLength": 4},
    },
    "required": ["kind", "count", "on", "tag"],
    "additionalProperties": False,
}


def records_schema(tokens: int) -> dict[str, Any]:
    """Of a list that takes about so many tokens; one record at least."""
    records = max(1, tokens // RECORD_TOKENS)
    return {"type": "array", "items": _RECORD, "minItems": records, "maxItems": records}


def most_tokens(schema: dict[str, Any]) -> int:
    """That any answer of this schema takes."""
    return int(schema["minItems"]) * RECORD_TOKENS + _BRACKETS_TOKENS


def misfit(text: str, schema: dict[str, Any]) -> str:
    """Why a text does not fit; empty if it does."""
    try:
        error = _validator(msgspec.json.encode(schema)).iter_errors(msgspec.json.decode(text))
    except msgspec.DecodeError as wrong:
        return f"no JSON: {wrong}"
    return next((str(each.message) for each in error), "")


@lru_cache(maxsize=8)
def _validator(schema: bytes) -> Any:
    return jsonschema.Draft202012Validator(msgspec.json.decode(schema))
