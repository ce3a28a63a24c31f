"""GET / and /console: the console's page, its live feed, and what operators may do from it."""

import hashlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

import msgspec
from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from mesh.errors import DeadlineExceeded, PeerUnavailable, RpcError
from services.frontend.answers.sse import event
from services.frontend.console.actions import Operator, decode_action
from services.frontend.console.asset_files import asset_files
from services.frontend.console.feed import ConsoleFeed
from services.frontend.console.stories import Stories
from services.frontend.console.update import Viewer
from services.frontend.errors import ApiError, bad_request, not_an_operator
from services.frontend.http.body import timely_body
from services.frontend.http.raw_route import RawRoute
from services.frontend.requests.service import FrontendService

log = logging.getLogger(__name__)

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS: Final = {
    # Nothing but our own files runs, is shown or is asked: an instance's name that holds markup stays text.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_NO_STORE: Final = {**HEADERS, "cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class Console:
    """The parts of the console, as its routes need them."""

    feed: ConsoleFeed
    stories: Stories
    operator: Operator


@dataclass(frozen=True, slots=True)
class _Asset:
    body: bytes
    media_type: str
    etag: str


def console_routes(frontend: FrontendService, console: Console) -> APIRouter:
    """The page and its files hold nothing of the mesh and need no key; all else does where keys are asked for."""
    router = APIRouter(include_in_schema=False, route_class=RawRoute)
    assets = _assets()

    @router.get("/")
    async def root(request: Request) -> Response:
        """Lead a browser to the console; anything else gets a 404, as before there was one."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return RedirectResponse("console", 303, HEADERS)

    @router.get("/console")
    async def page(request: Request) -> Response:
        """The page."""
        return _file(request, assets["index.html"])

    @router.get("/console/assets/{name:path}")
    async def asset(request: Request) -> Response:
        """A file of the page."""
        found = assets.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        return _file(request, found)

    @router.get("/console/state")
    async def state(request: Request) -> Response:
        """Everything, once."""
        body = await console.feed.latest(await _viewer(frontend, request))
        return Response(body, headers=_NO_STORE, media_type="application/json")

    @router.get("/console/events")
    async def events(request: Request) -> Response:
        """Everything, then what changes, once a second."""
        updates = console.feed.updates(await _viewer(frontend, request))
        first = await anext(updates, None)

        async def stream() -> AsyncIterator[bytes]:
            try:
                if first is not None:
                    yield event(first)
                async for update in updates:
                    yield event(update)
            finally:
                await updates.aclose()

        return StreamingResponse(stream(), headers=_NO_STORE, media_type="text/event-stream")

    @router.get("/console/requests/{request_id}")
    async def story(request: Request) -> Response:
        """What became of one request."""
        request_id = request.path_params["request_id"]
        found = await console.stories.find(request_id, await _viewer(frontend, request))
        if found is None:
            raise ApiError(404, f"Nobody here remembers the request `{request_id}`, or it is not of your key.")
        return Response(msgspec.json.encode(found), headers=_NO_STORE, media_type="application/json")

    @router.post("/console/actions")
    async def act(request: Request) -> Response:
        """Do what an operator asks for."""
        viewer = await _viewer(frontend, request)
        if not viewer.may_act:
            if not viewer.owner:
                raise ApiError(
                    403,
                    "This console is read-only: there are no operators here. Start the frontend with --api-keys-file "
                    "and a key made by `penstock key --operator`, or use the command that the console shows.",
                )
            raise not_an_operator(viewer.owner)
        try:
            action = decode_action(await timely_body(frontend, request))
        except msgspec.DecodeError as error:
            raise bad_request(f"That is no action: {error}.") from error
        outcome = "cancelled by the caller"
        try:
            done = await console.operator.carry_out(action)
            outcome = "done"
        except RpcError as error:
            outcome = str(error)
            raise ApiError(_status(error), str(error), type="mesh_error") from error
        finally:
            frontend.ordered(f"key {viewer.owner}", "console", {"command": action.command}, outcome)
        return Response(msgspec.json.encode(done), headers=_NO_STORE, media_type="application/json")

    return router


async def _viewer(frontend: FrontendService, request: Request) -> Viewer:
    """Raises ApiError (401)."""
    key = await frontend.authenticate(request.headers.get("authorization"))
    return Viewer() if key is None else Viewer(key.name, key.is_operator)


def _status(error: RpcError) -> int:
    return 504 if isinstance(error, DeadlineExceeded) else 503 if isinstance(error, PeerUnavailable) else 409


def _file(request: Request, asset: _Asset) -> Response:
    headers = {**HEADERS, "cache-control": "no-cache", "etag": asset.etag}
    if request.headers.get("if-none-match") == asset.etag:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, headers=headers, media_type=asset.media_type)


def _assets() -> dict[str, _Asset]:
    """All files of the page by their paths: nothing is read from the disk while serving."""
    return {
        name: _Asset(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
        for name, body in asset_files().items()
        if (media_type := _TYPES.get(name.rpartition(".")[2])) is not None
    }
