"""A Docker engine in this process, on a unix socket: what a carrier asks of one, answered as Docker's own does.

Nothing runs: a test says when a container ends, with which status, and what it wrote.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

IMAGE = "penstock/worker-cpu"


@dataclass(slots=True)
class FakeContainer:
    """What the engine keeps of one."""

    id: str
    name: str
    config: dict[str, Any]
    status: str = "created"
    exit_code: int = 0
    out_of_memory: bool = False
    log: bytes = b""
    signals: list[str] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def shown(self) -> dict[str, Any]:
        state = {"Status": self.status, "ExitCode": self.exit_code, "OOMKilled": self.out_of_memory, "Error": ""}
        return {"Id": self.id, "Name": f"/{self.name}", "Config": {"Labels": self.config["Labels"]}, "State": state}


class FakeDocker:
    """The containers of one engine."""

    def __init__(self, path: Path) -> None:
        self.address = f"unix://{path}"
        self.containers: dict[str, FakeContainer] = {}
        """By name."""
        self.refuses_to_start = ""
        """Why it starts nothing; "" where it does."""
        self.failures = 0
        """So many calls to come are answered 500."""
        self._path = path
        self._made = 0

    # -- what tests do

    def end(self, name: str, exit_code: int, log: str = "", out_of_memory: bool = False) -> None:
        container = self.containers[name]
        container.status, container.exit_code, container.out_of_memory = "exited", exit_code, out_of_memory
        for line in log.splitlines(keepends=True):
            text = line.encode()
            container.log += b"\x02\0\0\0" + len(text).to_bytes(4, "big") + text
        container.ended.set()

    def running(self) -> set[str]:
        return {name for name, each in self.containers.items() if each.status == "running"}

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        routes = [
            Route("/containers/create", self._on_create, methods=["POST"]),
            Route("/containers/json", self._on_list, methods=["GET"]),
            Route("/containers/{key}/json", self._on_inspect, methods=["GET"]),
            Route("/containers/{key}/logs", self._on_logs, methods=["GET"]),
            Route("/containers/{key}/start", self._on_start, methods=["POST"]),
            Route("/containers/{key}/kill", self._on_kill, methods=["POST"]),
            Route("/containers/{key}/wait", self._on_wait, methods=["POST"]),
            Route("/containers/{key}", self._on_remove, methods=["DELETE"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes),
            uds=str(self._path),
            log_level="critical",
            timeout_graceful_shutdown=0,
            lifespan="off",
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        try:
            yield
        finally:
            server.should_exit = True
            for each in self.containers.values():
                each.ended.set()
            await serving

    # -- what the engine answers

    def _found(self, request: Request) -> FakeContainer | None:
        key = request.path_params["key"]
        return next((each for each in self.containers.values() if key in (each.id, each.name)), None)

    async def _on_create(self, request: Request) -> Response:
        name, config = request.query_params["name"], await request.json()
        if name in self.containers:
            return refusal(409, f'Conflict. The container name "/{name}" is already in use')
        if config["Image"] != IMAGE:
            return refusal(404, f"No such image: {config['Image']}:latest")
        self._made += 1
        made = self.containers[name] = FakeContainer(f"{self._made:064x}", name, config)
        return JSONResponse({"Id": made.id, "Warnings": []}, 201)

    async def _on_list(self, request: Request) -> Response:
        (label,) = json.loads(request.query_params["filters"])["label"]
        name, _, value = label.partition("=")
        assert request.query_params["all"] == "true"
        found = [each for each in self.containers.values() if each.config["Labels"].get(name) == value]
        return JSONResponse([{"Id": each.id, "State": each.status} for each in found])

    async def _on_inspect(self, request: Request) -> Response:
        if self.failures:
            self.failures -= 1
            return refusal(500, "the engine is starting")
        container = self._found(request)
        return refusal(404, "No such container") if container is None else JSONResponse(container.shown)

    async def _on_logs(self, request: Request) -> Response:
        container = self._found(request)
        return refusal(404, "No such container") if container is None else Response(container.log)

    async def _on_start(self, request: Request) -> Response:
        container = self._found(request)
        assert container is not None
        if self.refuses_to_start:
            return refusal(500, self.refuses_to_start)
        container.status = "running"
        return Response(status_code=204)

    async def _on_kill(self, request: Request) -> Response:
        container = self._found(request)
        if container is None:
            return refusal(404, "No such container")
        if container.status != "running":
            return refusal(409, f"container {container.id} is not running")
        signal = request.query_params["signal"]
        container.signals.append(signal)
        if signal == "SIGKILL":
            self.end(container.name, 137)
        return Response(status_code=204)

    async def _on_wait(self, request: Request) -> Response:
        assert request.query_params["condition"] == "not-running"
        container = self._found(request)
        if container is None:
            return refusal(404, "No such container")
        await container.ended.wait()
        return JSONResponse({"StatusCode": container.exit_code})

    async def _on_remove(self, request: Request) -> Response:
        assert request.query_params["force"] == "true"
        container = self._found(request)
        if container is None:
            return refusal(404, "No such container")
        del self.containers[container.name]
        container.ended.set()
        return Response(status_code=204)


def refusal(code: int, message: str) -> Response:
    return JSONResponse({"message": message}, code)
