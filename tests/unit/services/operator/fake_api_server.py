"""An API server in this process, over HTTP: what the operator asks of one, as Kubernetes' own answers it.

It keeps resource versions, uids, generations, finalizers, grace periods, the status and scale subresources, and who
owns which field under server-side apply; watches replay from a version, and are answered 410 where that is too old.
Nothing runs: a test says what becomes of pods.
"""

import asyncio
import copy
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

Manifest = dict[str, Any]
STAMP = "2026-01-01T00:00:00Z"
MODELS, PODS = "penstockmodels", "pods"
NAMESPACE = "mesh"


class Refused(Exception):
    """Answered with this code and reason."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class FakeApiServer:
    """The objects of one namespace."""

    def __init__(self) -> None:
        self.url = ""
        self.calls: list[tuple[str, str]] = []
        """Of writes: method and path, as they came."""
        self.lose_answers = 0
        """So many writes to come are carried out, and their answers lost."""
        self.before_patch: Callable[[], None] | None = None
        """Done once, before the next patch is looked at: what somebody else writes in that moment."""
        self._objects: dict[tuple[str, str], Manifest] = {}
        self._owners: dict[tuple[str, str], dict[str, str]] = {}
        self._version = 100
        self._events: list[tuple[int, str, str, Manifest]] = []
        self._forgotten = 0
        """Events up to this version are not replayed any more."""
        self._changed = asyncio.Event()
        self._watches = 0
        """Another number has the watches that are open end."""
        self._served: uvicorn.Server | None = None

    # -- what tests do

    def get(self, kind: str, name: str) -> Manifest:
        return copy.deepcopy(self._objects[kind, name])

    def names(self, kind: str) -> set[str]:
        return {name for found, name in self._objects if found == kind}

    def living_pods(self) -> set[str]:
        return {name for name in self.names(PODS) if "deletionTimestamp" not in self.get(PODS, name)["metadata"]}

    def apply(self, manifest: Manifest) -> None:
        """As a user: created, or its spec replaced."""
        name = manifest["metadata"]["name"]
        if (MODELS, name) not in self._objects:
            self._create(MODELS, manifest)
        else:
            standing = self.get(MODELS, name)
            self._store(MODELS, {**standing, "spec": manifest["spec"]})

    def delete(self, kind: str, name: str, grace_s: int | None = None) -> None:
        """As somebody else than the operator."""
        self._delete(kind, name, grace_s)

    def runs(self, pod: str) -> None:
        """Its kubelet has started it."""
        self._set_status(pod, {"phase": "Running", "containerStatuses": [_container_status({"running": {}})]})

    def ends(self, pod: str, exit_status: int, message: str = "") -> None:
        """Its worker has ended; one that was told to is then gone."""
        terminated = {"exitCode": exit_status, "message": message, "reason": "Error"}
        phase = "Failed" if exit_status else "Succeeded"
        status = {"phase": phase, "containerStatuses": [_container_status({"terminated": terminated})]}
        self._set_status(pod, status)
        if "deletionTimestamp" in self._objects[PODS, pod]["metadata"]:
            self._remove(PODS, pod)

    def cannot_be_scheduled(self, pod: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._set_status(pod, {"phase": "Pending", "conditions": [condition]})

    def cut_watches(self, *, forget: bool = False) -> None:
        """`forget`: what came before cannot be watched from any more."""
        self._watches += 1
        if forget:
            self._version += 1
            self._forgotten = self._version
        self._tell()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once it holds; it is asked after every change, and now and then."""
        async with asyncio.timeout(20):
            while not holds():
                try:
                    async with asyncio.timeout(0.1):
                        await self._changed.wait()
                except TimeoutError:
                    continue

    # -- the server

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        base = f"/namespaces/{NAMESPACE}"
        pods, models = f"/api/v1{base}/{PODS}", f"/apis/penstock.io/v1alpha1{base}/{MODELS}"
        routes = [
            Route(pods, self._on_collection, methods=["GET", "POST"], name=PODS),
            Route(pods + "/{name}", self._on_object, methods=["GET", "PATCH", "DELETE"]),
            Route(models, self._on_collection, methods=["GET", "POST"], name=MODELS),
            Route(models + "/{name}", self._on_object, methods=["GET", "PATCH", "DELETE"]),
            Route(models + "/{name}/{sub}", self._on_object, methods=["GET", "PUT", "PATCH"]),
        ]
        config = uvicorn.Config(
            Starlette(routes=routes), port=0, log_level="critical", timeout_graceful_shutdown=0, lifespan="off"
        )
        server = self._served = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0)
        self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield
        finally:
            server.should_exit = True
            self.cut_watches()
            await serving

    async def _on_collection(self, request: Request) -> Response:
        kind = request.url.path.rpartition("/")[2]
        if request.method == "POST":
            return await self._answer(request, lambda body: self._create(kind, body))
        labels = request.query_params.get("labelSelector", "")
        if request.query_params.get("watch"):
            since = int(request.query_params["resourceVersion"])
            return StreamingResponse(self._watch(kind, labels, since), media_type="application/json")
        items = [each for (found, _), each in self._objects.items() if found == kind and _has(each, labels)]
        listed = {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}
        return JSONResponse(listed)

    async def _on_object(self, request: Request) -> Response:
        kind = PODS if f"/{PODS}/" in request.url.path else MODELS
        name, sub, query = request.path_params["name"], request.path_params.get("sub", ""), request.query_params
        if request.method == "GET":
            return await self._answer(
                request, lambda _: self._scale_of(name) if sub == "scale" else self._find(kind, name)
            )
        if request.method == "PUT":
            return await self._answer(request, lambda body: self._scale(name, body))
        if request.method == "DELETE":
            grace_s = int(query["gracePeriodSeconds"]) if "gracePeriodSeconds" in query else None
            return await self._answer(request, lambda _: self._delete(kind, name, grace_s))
        if request.headers["content-type"] == "application/apply-patch+yaml":
            manager, force = query["fieldManager"], query.get("force") == "true"
            return await self._answer(request, lambda body: self._apply(kind, name, sub, body, manager, force))
        return await self._answer(request, lambda body: self._merge(kind, name, sub, body))

    async def _answer(self, request: Request, act: Callable[[Manifest], Manifest]) -> Response:
        body = await request.body()
        if request.method != "GET":
            self.calls.append((request.method, request.url.path.partition(f"/{NAMESPACE}/")[2]))
        if request.method == "PATCH" and self.before_patch is not None:
            before, self.before_patch = self.before_patch, None
            before()
        try:
            answer = act(json.loads(body) if body else {})
        except Refused as error:
            status = {"kind": "Status", "status": "Failure", "code": error.code, "reason": error.reason}
            return JSONResponse({**status, "message": str(error)}, error.code)
        if request.method != "GET" and self.lose_answers:
            self.lose_answers -= 1
            return Response("the way back is lost", 504, media_type="text/plain")
        return JSONResponse(answer)

    async def _watch(self, kind: str, labels: str, since: int) -> AsyncIterator[bytes]:
        watches = self._watches
        if since < self._forgotten:
            gone = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired", "message": "too old"}
            yield json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"
            return
        while watches == self._watches:
            changed = self._changed
            for version, change, found, shown in tuple(self._events):
                if version > since and found == kind and _has(shown, labels):
                    since = version
                    yield json.dumps({"type": change, "object": shown}).encode() + b"\n"
            await changed.wait()

    # -- objects

    def _find(self, kind: str, name: str) -> Manifest:
        if (kind, name) not in self._objects:
            raise Refused(404, "NotFound", f'{kind} "{name}" not found')
        return self.get(kind, name)

    def _create(self, kind: str, manifest: Manifest) -> Manifest:
        name = manifest["metadata"]["name"]
        if (kind, name) in self._objects:
            raise Refused(409, "AlreadyExists", f'{kind} "{name}" already exists')
        made = {"uid": str(uuid.uuid4()), "creationTimestamp": STAMP, "namespace": NAMESPACE, "generation": 1}
        created = {**copy.deepcopy(manifest), "metadata": {**copy.deepcopy(manifest["metadata"]), **made}}
        created.pop("status", None)
        if kind == PODS:
            created["status"] = {"phase": "Pending"}
        self._owners[kind, name] = {}
        return self._store(kind, created, change="ADDED")

    def _store(self, kind: str, manifest: Manifest, change: str = "MODIFIED") -> Manifest:
        name = manifest["metadata"]["name"]
        standing = self._objects.get((kind, name))
        if standing == manifest:
            return self.get(kind, name)
        self._version += 1
        stored = copy.deepcopy(manifest)
        if standing is not None and standing.get("spec") != stored.get("spec"):
            stored["metadata"]["generation"] = standing["metadata"]["generation"] + 1
        stored["metadata"]["resourceVersion"] = str(self._version)
        self._objects[kind, name] = stored
        self._events.append((self._version, change, kind, copy.deepcopy(stored)))
        self._tell()
        if "deletionTimestamp" in stored["metadata"] and kind == MODELS and not stored["metadata"].get("finalizers"):
            self._remove(kind, name)
        return copy.deepcopy(stored)

    def _remove(self, kind: str, name: str) -> None:
        self._version += 1
        removed = self._objects.pop((kind, name))
        removed["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, "DELETED", kind, removed))
        self._tell()

    def _delete(self, kind: str, name: str, grace_s: int | None) -> Manifest:
        found = self._find(kind, name)
        waits = bool(found["metadata"].get("finalizers"))
        if kind == PODS:
            grace_s = found["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            ended = found["status"]["phase"] in ("Succeeded", "Failed")
            waits = grace_s > 0 and not ended
        if waits:
            found["metadata"].setdefault("deletionTimestamp", STAMP)
            found["metadata"]["deletionGracePeriodSeconds"] = grace_s
            return self._store(kind, found)
        self._remove(kind, name)
        return {"kind": "Status", "status": "Success"}

    def _merge(self, kind: str, name: str, sub: str, body: Manifest) -> Manifest:
        found = self._find(kind, name)
        asked = body.get("metadata", {}).pop("resourceVersion", None)
        if asked is not None and asked != found["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f"{name} has been modified: its version is not {asked}")
        if found["metadata"].get("deletionTimestamp"):
            added = set(body.get("metadata", {}).get("finalizers") or ()) - set(found["metadata"]["finalizers"])
            if added:
                raise Refused(422, "Invalid", "no finalizers can be added to what is being deleted")
        part = {key: value for key, value in body.items() if (key == "status") == (sub == "status")}
        return self._store(kind, _merged(found, part))

    def _apply(self, kind: str, name: str, sub: str, body: Manifest, manager: str, force: bool) -> Manifest:
        """Server-side apply; lists are owned as a whole."""
        found = self._find(kind, name)
        owners = self._owners[kind, name]
        part = {"status": body["status"]} if sub == "status" else {"spec": body.get("spec", {})}
        for path, value in _leaves(part):
            other = owners.get(path, manager)
            if other != manager and _at(found, path) != value and not force:
                raise Refused(409, "Conflict", f"conflict with {other}: {path}")
            owners[path] = manager
        return self._store(kind, _merged(found, part))

    def _scale_of(self, name: str) -> Manifest:
        found = self._find(MODELS, name)
        status = found.get("status", {})
        metadata = {"name": name, "resourceVersion": found["metadata"]["resourceVersion"]}
        shown = {"replicas": status.get("replicas", 0), "selector": status.get("selector", "")}
        spec = {"replicas": found["spec"].get("replicas", 0)}
        return {"kind": "Scale", "apiVersion": "autoscaling/v1", "metadata": metadata, "spec": spec, "status": shown}

    def _scale(self, name: str, body: Manifest) -> Manifest:
        found = self._find(MODELS, name)
        asked = body["metadata"].get("resourceVersion")
        if asked and asked != found["metadata"]["resourceVersion"]:
            raise Refused(409, "Conflict", f"{name} has been modified: its version is not {asked}")
        found["spec"]["replicas"] = body["spec"]["replicas"]
        self._store(MODELS, found)
        return self._scale_of(name)

    def _set_status(self, pod: str, status: Manifest) -> None:
        self._store(PODS, {**self.get(PODS, pod), "status": status})

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _has(manifest: Manifest, labels: str) -> bool:
    """Selectors by which a label is there, whatever its value."""
    return all(each in manifest["metadata"].get("labels", {}) for each in labels.split(",") if each)


def _container_status(state: Manifest) -> Manifest:
    """With all that Kubernetes says is required."""
    required = {"image": "penstock/worker-cpu", "imageID": "", "ready": False, "restartCount": 0}
    return {"name": "worker", "state": state, **required}


def _merged(into: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(into) if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged


def _leaves(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(part, dict):
        for key, value in part.items():
            yield from _leaves(value, f"{path}/{key}")
    else:
        yield path, part


def _at(manifest: Any, path: str) -> Any:
    for key in path.split("/")[1:]:
        manifest = manifest.get(key) if isinstance(manifest, dict) else None
    return manifest
