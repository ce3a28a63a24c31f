"""The OpenAI-compatible ASGI application: routes, and how errors outside of a generation are answered and counted."""

from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from services.frontend.cascade.service import CascadeService
from services.frontend.errors import ApiError
from services.frontend.http.errors import error_response
from services.frontend.http.exchange import (
    CLIENT_CLOSED_REQUEST,
    INSTANCE_HEADER,
    POLICY_HEADER,
    WITHOUT_EFFECT_HEADER,
)
from services.frontend.http.openapi import document
from services.frontend.http.request_ids import MESH_ID_HEADER, REQUEST_ID_HEADER, id_headers, new_request_id
from services.frontend.http.routes_batch import batch_routes
from services.frontend.http.routes_console import Console, console_routes
from services.frontend.http.routes_generate import generation_routes
from services.frontend.http.routes_info import info_routes, metrics_routes
from services.frontend.http.routes_lora import lora_routes
from services.frontend.http.routes_messages import messages_routes
from services.frontend.http.routes_pooling import pooling_routes
from services.frontend.http.routes_responses import responses_routes
from services.frontend.http.routes_scoring import scoring_routes
from services.frontend.http.routes_text import text_routes
from services.frontend.requests.adapter_loader import AdapterLoader
from services.frontend.settings import FrontendSettings


def allow_cross_origin(app: FastAPI, settings: FrontendSettings) -> None:
    """Let pages of the allowed origins call the endpoint from a browser. Requests without an `Origin` header pay
    nothing for it, and without allowed origins there is no such middleware at all."""
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            expose_headers=[REQUEST_ID_HEADER, MESH_ID_HEADER, WITHOUT_EFFECT_HEADER, INSTANCE_HEADER, POLICY_HEADER],
        )


def create_app(service: CascadeService, loader: AdapterLoader, console: Console | None = None) -> FastAPI:
    """The ASGI application of a frontend; every error it answers has OpenAI's form. `console` None: there is none."""
    metrics, settings = service.frontend.metrics, service.frontend.settings
    app = FastAPI(
        title="Penstock",
        version="1",
        description="One OpenAI-compatible endpoint in front of many instances.",
        openapi_url="/openapi.json" if settings.docs else None,
    )
    app.include_router(generation_routes(service))
    app.include_router(responses_routes(service))
    app.include_router(messages_routes(service))
    app.include_router(pooling_routes(service.frontend))
    app.include_router(text_routes(service.frontend))
    app.include_router(batch_routes(service))
    app.include_router(scoring_routes(service))
    app.include_router(lora_routes(service.frontend, loader))
    app.include_router(info_routes(service))
    if settings.http_metrics:
        app.include_router(metrics_routes(service.frontend.mesh_metrics))
    if console is not None:
        app.include_router(console_routes(service.frontend, console))
    allow_cross_origin(app, settings)
    app.openapi = partial(document, app)  # type: ignore[method-assign]

    def count(request: Request, status: int) -> None:
        known = getattr(request.scope.get("route"), "path", "unknown")
        metrics.requests.labels("", known, str(status)).inc()

    def refusal(request: Request, error: ApiError) -> Response:
        """It has ids, also where the request was refused before it had one."""
        count(request, error.status)
        ids = id_headers(
            request.headers.get(REQUEST_ID_HEADER), new_request_id("refused", None, service.frontend.entropy)
        )
        error.headers = {**ids, **error.headers}
        return error_response(error)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return refusal(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        """Unknown paths and methods, in OpenAI's form like any other error."""
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {request.url.path}"
        return refusal(request, ApiError(error.status_code, message, headers=error.headers or {}))

    async def on_disconnect(request: Request, error: Exception) -> Response:
        """The client left while sending its body: nobody sees this answer."""
        count(request, CLIENT_CLOSED_REQUEST)
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientDisconnect, on_disconnect)
    return app
