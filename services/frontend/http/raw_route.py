"""Routes without FastAPI's dependency injection."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class RawRoute(APIRoute):
    """FastAPI's place for another handler, used to do without its dependency injection, which costs as much as all
    our own checks of a request. The endpoint has one parameter, the request, and returns a response; the route
    stays in the OpenAPI document."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint itself, without what FastAPI puts around it."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint
