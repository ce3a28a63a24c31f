"""What a client is told instead of an answer: one error type, and a function for each reason.

Any part of the frontend may raise them; `http.errors` writes them as OpenAI's clients expect them.

400  bad_request           the request can never be served as it is; `param` names the culprit
     context_too_long      prompt and answer do not fit the model
401  invalid_api_key
     expired_api_key
     invalid_token         a JWT that is none of the issuer's, or not for us
403  not_an_operator       the key may ask for answers only
     lacks_scope           the token may not ask for anything here
404  model_not_found
     stream_not_found      there is nothing to resume
     stream_behind         what there is to resume has not come so far
408  body_timeout          the client takes too long to send its request
409  adopted_elsewhere     the client gets this stream over another connection
413  body_too_large
429  too_many_requests     the queue, the waiting room or a key's limit; with the seconds until another try
499  client_too_slow       the client does not read its answer, so it never sees this
500  internal_error        a bug of ours
502  upstream_failed       the worker that had the request failed
503  unavailable           for a reason that passes
     stopped               this frontend ends
504  deadline_exceeded
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

INVALID_REQUEST = "invalid_request_error"
DEADLINE_EXCEEDED = "deadline_exceeded"
STOPPED = "stopped"
ADOPTED = "adopted_elsewhere"


@dataclass(eq=False)
class ApiError(Exception):
    """What a client is told instead of an answer."""

    status: int
    message: str
    type: str = INVALID_REQUEST
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never be served as it is."""
    return ApiError(400, message, param=param, code=code)


def context_too_long(
    prompt_tokens: int, max_tokens: int, limit_tokens: int, param: str, *, is_least: bool = False
) -> ApiError:
    """400: prompt and answer do not fit the model's context. `is_least`: the prompt has so many tokens or more."""
    at_least = "at least " if is_least else ""
    return bad_request(
        f"This model's maximum context length is {limit_tokens} tokens. However, your request has {at_least}"
        f"{prompt_tokens} tokens in the prompt and asks for at least {max_tokens} in the answer. Please reduce "
        "the length of the input prompt, or ask for fewer.",
        param,
        "context_length_exceeded",
    )


def out_of_vocabulary(token_id: int, model: str, size: int, param: str) -> ApiError:
    """400: there is no such token."""
    return bad_request(f"Token id {token_id} is out of vocabulary: `{model}` has {size} tokens.", param)


def model_not_found(model: str) -> ApiError:
    """404: nobody in the mesh serves this model."""
    return ApiError(
        404,
        f"The model `{model}` does not exist; GET /v1/models lists those that do.",
        param="model",
        code="model_not_found",
    )


def stream_not_found(request_id: str) -> ApiError:
    """404: nobody has the request any more, or has ever had it."""
    return ApiError(
        404,
        f"There is no stream of `{request_id}` to resume: it is unknown, was not streamed, or ended too long ago.",
        param="request_id",
        code="request_not_found",
    )


def stream_behind(request_id: str) -> ApiError:
    """404: of a choice there is only a life that has generated less than the client has seen, if that is true."""
    return ApiError(
        404,
        f"There is no stream of `{request_id}` that has come as far as `Last-Event-ID` says: the worker that had is "
        "out of reach, or the id is of another stream.",
        param="last-event-id",
        code="request_not_found",
    )


def invalid_api_key() -> ApiError:
    """401: no key, or an unknown one."""
    return ApiError(
        401,
        "Incorrect API key provided. Pass a known key as `Authorization: Bearer KEY`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def not_an_operator(key_name: str) -> ApiError:
    """403: the key is good, but not for this."""
    return ApiError(
        403,
        f"The key of {key_name} may not do this; it takes an operator's (`penstock key NAME --operator`).",
        "permission_error",
        code="not_an_operator",
    )


def invalid_token(reason: str) -> ApiError:
    """401: a JWT that opens nothing. `reason`: what is wrong with it."""
    return ApiError(
        401,
        f"This bearer token is not accepted: {reason}.",
        code="invalid_api_key",
        headers={"www-authenticate": 'Bearer error="invalid_token"'},
    )


def lacks_scope(scope: str) -> ApiError:
    """403: the token is good, but not for this endpoint."""
    return ApiError(
        403,
        f"This bearer token lacks the scope `{scope}`; ask your issuer for one with it.",
        "permission_error",
        code="insufficient_scope",
        headers={"www-authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
    )


def expired_api_key(last_day: str) -> ApiError:
    """401: the key was good once."""
    return ApiError(
        401,
        f"This API key has expired: its last day was {last_day}. Ask your operator for another one.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def too_many_requests(message: str, code: str, retry_after_s: float) -> ApiError:
    """429 with the time after which another try makes sense."""
    seconds = max(1, round(retry_after_s + 0.5))
    return ApiError(429, message, "rate_limit_error", code=code, headers={"retry-after": str(seconds)})


def body_timeout() -> ApiError:
    """408: the body did not arrive in time."""
    return ApiError(408, "The request's body did not arrive in time.", code="request_timeout")


def body_too_large(limit_bytes: int) -> ApiError:
    """413: the body is not read any further."""
    return ApiError(413, f"The request body is larger than {limit_bytes} bytes.", code="request_too_large")


def client_too_slow() -> ApiError:
    """499, nginx's status for a client that is gone: too much waits for one that does not read."""
    return ApiError(499, "The client does not read its answer.", "server_error", code="client_too_slow")


def unavailable(message: str, code: str = "service_unavailable") -> ApiError:
    """503: not now, for a reason that passes."""
    return ApiError(503, message, "server_error", code=code, headers={"retry-after": "1"})


def upstream_failed(message: str, code: str) -> ApiError:
    """502: the worker that had the request failed."""
    return ApiError(502, message, "server_error", code=code)


def deadline_exceeded(deadline_s: float) -> ApiError:
    """504: the request took longer than the frontend lets any request take."""
    return ApiError(
        504,
        f"The request was not finished within its deadline of {deadline_s:g} s; ask for fewer tokens.",
        "server_error",
        code=DEADLINE_EXCEEDED,
    )


def adopted_elsewhere() -> ApiError:
    """409: the client has come back and gets its stream over another connection; this one ends."""
    return ApiError(409, "This stream was resumed over another connection.", code=ADOPTED)


def stopped() -> ApiError:
    """503: this frontend ends with all that it serves."""
    return unavailable("The frontend was stopped; try again.", STOPPED)


def internal_error() -> ApiError:
    """500: a bug of ours; the log has the traceback."""
    return ApiError(500, "The frontend failed on this request; its log says why.", "server_error", code="internal")
