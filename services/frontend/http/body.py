"""From the bytes of a request body to its type, every way of being wrong named."""

import asyncio
import re
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from services.frontend.errors import ApiError, bad_request, body_timeout, body_too_large
from services.frontend.requests.service import FrontendService

BODY_DEADLINE_S: Final = 60.0
_OWN: Final = "penstock"
"""What no other server knows: nobody sends more of it than there is, unless by mistake."""
MAX_UNKNOWN_WITHIN: Final = 16
"""Unknown parameters that a request may have within others: each costs a look at the whole of it."""

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[([^\]]*)\]")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>[^`]*)`")


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is known to be larger than `limit_bytes`."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > limit_bytes:
        raise body_too_large(limit_bytes)
    pieces: list[bytes] = []
    received_bytes = 0
    async for piece in request.stream():
        received_bytes += len(piece)
        if received_bytes > limit_bytes:
            raise body_too_large(limit_bytes)
        pieces.append(piece)
    return b"".join(pieces)


async def timely_body(service: FrontendService, request: Request) -> bytes:
    """The whole body. Raises ApiError: 413 for one that is too large, 408 for one that does not come in time."""
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            return await read_body(request, service.settings.max_body_bytes)
    except TimeoutError as error:
        raise body_timeout() from error


def decode_body(body: bytes, kind: type[T]) -> T:
    """The request. Raises ApiError (400) naming the parameter that is missing, unknown or wrong."""
    try:
        return _decoder(kind).decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from error
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not valid UTF-8: {error.reason} at byte {error.start}.") from error
    except msgspec.DecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise bad_request("The body is nested too deeply.") from error


def decode_leniently(body: bytes, kind: type[S]) -> tuple[S, list[str]]:
    """The request as vLLM reads it, and the names of its unknown parameters, which are left out, for the client to be
    told. What is null is left out, too, and a text of digits is a number. Raises ApiError (400) naming the parameter
    that is missing or wrong.

    Most bodies need none of this, and cost as much as with `decode_body`.
    """
    try:
        return _decoder(kind).decode(body), []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    fields: dict[str, Any] = decode_body(body, dict)
    known = frozenset(kind.__struct_fields__)
    unknown = [name for name, value in fields.items() if name not in known and value is not None]
    fields = {name: value for name, value in fields.items() if name in known and value is not None}
    for _ in range(MAX_UNKNOWN_WITHIN):
        try:
            return msgspec.convert(fields, kind, strict=False), unknown
        except msgspec.ValidationError as error:
            name = _drop_unknown(fields, str(error))
            if name is None:
                raise _invalid(str(error)) from error
            unknown.append(name)
    raise bad_request(
        f"More than {MAX_UNKNOWN_WITHIN} parameters within others are unknown.", unknown[-1], "unknown_parameter"
    )


def _drop_unknown(fields: dict[str, Any], message: str) -> str | None:
    """The unknown field that an error is about, which is no longer there then; None: it is about something else."""
    at = _PATH.search(message)
    unknown = _UNKNOWN_FIELD.match(message)
    if unknown is None or (at and at["path"].startswith(_OWN)):
        return None
    place: Any = fields
    for name, index in _STEP.findall(at["path"] if at else ""):
        try:
            place = place[name] if name else place[int(index)]
        except (LookupError, TypeError, ValueError):  # the path says `[...]` for a key of any name
            return None
    if not isinstance(place, dict) or unknown["name"] not in place:
        return None
    del place[unknown["name"]]
    return _join(at["path"] if at else "", unknown["name"])


_DECODERS: dict[type[Any], msgspec.json.Decoder[Any]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    return _DECODERS[kind]


def _invalid(message: str) -> ApiError:
    at = _PATH.search(message)
    path = at["path"] if at else ""
    what = message[: at.start()] if at else message
    if unknown := _UNKNOWN_FIELD.match(what):
        param = _join(path, unknown["name"])
        return bad_request(f"Unknown parameter: `{param}`.", param, "unknown_parameter")
    if missing := _MISSING_FIELD.match(what):
        param = _join(path, missing["name"])
        return bad_request(f"Missing required parameter: `{param}`.", param, "missing_required_parameter")
    return bad_request(f"Invalid `{path or 'body'}`: {what}.", path or None, "invalid_value")


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
