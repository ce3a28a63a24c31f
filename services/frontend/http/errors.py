"""Errors as OpenAI's clients expect them: an HTTP status and {"error": {message, type, param, code}}."""

import msgspec
from starlette.responses import Response

from services.frontend.answers.schema import Error, ErrorObject
from services.frontend.errors import ApiError


def error_body(error: ApiError) -> bytes:
    """The JSON object; also what an SSE error event carries."""
    return msgspec.json.encode(Error(ErrorObject(error.message, error.type, error.param, error.code)))


def error_response(error: ApiError) -> Response:
    """The HTTP form of an error."""
    return Response(error_body(error), error.status, dict(error.headers), media_type="application/json")
