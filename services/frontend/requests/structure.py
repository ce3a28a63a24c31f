"""What the text of an answer must fit, from the parameters that ask for it to what the engines are told.

`response_format` is OpenAI's, `structured_outputs` vLLM's own. Engines take the fields of vLLM's
`StructuredOutputsParams` as a JSON object. A JSON schema is checked against its own meta-schema here, so that a wrong
one is refused under its parameter's name; what a backend cannot do with a right one, only the engine knows.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, Literal

import msgspec

from mesh.runtime import Threads
from services.frontend.errors import ApiError, bad_request

MAX_STRUCTURE_CHARACTERS: Final = 64 * 1024
"""Of what an engine is told. It travels with each choice, and again with each recovery."""

MAX_SCHEMAS_CHARACTERS: Final = 4 * MAX_STRUCTURE_CHARACTERS
"""Of all schemas of a request together."""
_LARGE_CHARACTERS: Final = 1024


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The schema of `response_format`."""

    name: str
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted either way: a schema is always enforced."""


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """OpenAI's way to ask for text of a form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    """Only with that type, which needs it."""
    structures: list[dict[str, Any]] | None = None
    """Of vLLM's older form of `structural_tag`, with `triggers`."""
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    """Of xgrammar's form of `structural_tag`."""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """vLLM's way to ask for text of a form: one of the first six."""

    json: dict[str, Any] | str | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """EBNF or Lark."""
    json_object: bool | None = None
    structural_tag: str | None = None

    # vLLM takes these of a request and goes by those of its engine: refused unless they ask for nothing.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


def structure_of(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None
) -> tuple[str, str]:
    """What engines are told, and the parameter that says so; both are empty where the text is free. Raises ApiError
    (400, `param` set) for what is wrong."""
    has_format = response_format is not None and response_format.type != "text"
    if structured_outputs is not None:
        if has_format:
            raise bad_request("Give `response_format` or `structured_outputs`, not both.", "structured_outputs")
        return _structured_outputs(structured_outputs), "structured_outputs"
    if response_format is None or not has_format:
        return "", ""
    return _response_format(response_format), "response_format"


async def check_large_schemas(schemas: Iterable[Any], threads: Threads) -> None:
    """Look at schemas that take long (64 KiB: 0.5 s) beside the event loop, so that `check_schema` knows them.
    Whether they are right is told there. Raises ApiError (400) if they are too much together."""
    left = MAX_SCHEMAS_CHARACTERS
    for schema in schemas:
        encoded = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        left -= len(encoded)
        if left < 0:
            raise bad_request(f"The schemas have more than {MAX_SCHEMAS_CHARACTERS} characters together.", "tools")
        if _LARGE_CHARACTERS < len(encoded) <= MAX_STRUCTURE_CHARACTERS:
            await threads.run(_schema_error, encoded)


def json_structure(schema: dict[str, Any], param: str) -> str:
    """What engines are told of JSON that fits a schema, which was looked at before. Raises ApiError (400) if it is too
    long."""
    return encoded_structure({"json": schema}, param)


def refused_structure(error: ApiError, param: str) -> ApiError:
    """A worker's refusal of a request under a structure, which is taken for the reason."""
    return bad_request(error.message, param, error.code) if error.status == 400 and error.param is None else error


def _response_format(response_format: ResponseFormat) -> str:
    match response_format.type:
        case "json_schema":
            param = "response_format.json_schema"
            if response_format.json_schema is None or response_format.json_schema.schema is None:
                raise bad_request("`response_format` of type `json_schema` needs a `json_schema.schema`.", param)
            check_schema(response_format.json_schema.schema, f"{param}.schema")
            return json_structure(response_format.json_schema.schema, f"{param}.schema")
        case "structural_tag":
            tag = msgspec.json.encode(response_format).decode()
            return encoded_structure({"structural_tag": tag}, "response_format")
        case _:
            return encoded_structure({"json_object": True}, "response_format")


def _structured_outputs(asked: StructuredOutputs) -> str:
    named = [kind for kind in KINDS if getattr(asked, kind) is not None]
    if len(named) != 1:
        given = " and ".join(named) or "none"
        raise bad_request(f"`structured_outputs` needs one of {', '.join(KINDS)}; {given} given.", "structured_outputs")
    for option in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
        if getattr(asked, option):
            message = f"`structured_outputs.{option}` has no effect by request: it is an option of the engine."
            raise bad_request(message, f"structured_outputs.{option}", "unsupported_parameter")
    param = f"structured_outputs.{named[0]}"
    if asked.json is not None:
        check_schema(asked.json, param)
    elif not getattr(asked, named[0]):
        raise bad_request(f"`{param}` must not be empty or false; leave it out instead.", param)
    return encoded_structure({named[0]: getattr(asked, named[0])}, param)


def check_schema(schema: dict[str, Any] | str, param: str) -> None:
    """Raises ApiError (400) for what is no JSON schema."""
    encoded = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    if len(encoded) > MAX_STRUCTURE_CHARACTERS:
        raise _too_long(param)
    if (wrong := _schema_error(encoded)) is not None:
        raise bad_request(f"`{param}` is no JSON schema: {wrong}.", param, "invalid_json_schema")


@lru_cache(maxsize=256)
def _schema_error(encoded: str) -> str | None:
    """What is wrong with a schema. Applications send the same few again and again; looking at one takes about 1 ms."""
    import jsonschema  # 60 ms, and only who asks for a schema needs it

    try:
        schema = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error).rstrip(".")
    if not isinstance(schema, dict):
        return "it must be an object"
    try:
        jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)
    except jsonschema.SchemaError as error:
        place = ".".join(str(step) for step in error.absolute_path)
        return f"{error.message[:300]}{f' (at {place})' if place else ''}"
    except RecursionError:
        return "it nests too deeply"
    return None


def encoded_structure(fields: dict[str, Any], param: str) -> str:
    """Fields of vLLM's `StructuredOutputsParams`, as engines are told them. Raises ApiError (400) if it is too long."""
    encoded = msgspec.json.encode(fields).decode()
    if len(encoded) > MAX_STRUCTURE_CHARACTERS:
        raise _too_long(param)
    return encoded


def _too_long(param: str) -> ApiError:
    return bad_request(f"`{param}` is longer than {MAX_STRUCTURE_CHARACTERS} characters.", param)
