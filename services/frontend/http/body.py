"""From the bytes of a request body to its type, every way of being wrong named."""

import asyncio
import re
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from services.frontend.errors import ApiError, bad_request, body_timeout, body_too_large
from services.frontend.requests.service import FrontendService

BODY_DEADLINE_S: Final = 60.0

T = TypeVar("T", bound=msgspec.Struct)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
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


_DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[msgspec.Struct]] = {}


def _decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind)
    return _DECODERS[kind]  # type: ignore[return-value]


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
