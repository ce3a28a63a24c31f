"""The process that speaks with a Ray cluster for `penstock up`: calls come in on stdin, answers go out on stdout, each
a JSON object on a line of its own.

It is a process of its own since a Ray driver ends, without asking, when its node or the head of its cluster does. Its
actors are detached: they outlive it, and its successor finds them by name. Nobody else imports Ray.
"""

import asyncio
import base64
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, BinaryIO, Final

from services.cli.carriers.ray_actor import WorkerActor, WorkerOrder

GONE, AWAY = "gone", "away"
"""Kinds of errors: an actor that has ended, and a cluster that gives no answer."""
KILL_S: Final = 5.0
MAX_LINE_BYTES: Final = 1 << 20
MAX_REASON_CHARACTERS: Final = 500
CLIENT_SCHEME: Final = "ray://"
CALLS: Final = frozenset({"start", "wait", "terminate", "kill", "remove", "actors", "why_waiting"})


class ActorGone(Exception):
    """It ended by itself, was killed, or its node is lost."""


class RayDriver:
    """What the supervisor asks of a cluster. Names are those of actors, each for one process only."""

    def __init__(self, ray: Any, namespace: str) -> None:
        """`ray`: the module, connected."""
        self._ray = ray
        self._namespace = namespace
        self._handles: dict[str, Any] = {}
        self._remote = ray.remote(WorkerActor)

    async def start(self, name: str, gpus: int, cpus: float, order: Mapping[str, Any]) -> dict[str, Any]:
        """Have an actor run this; answers when its process does, which may be never, with node and process id. Asked
        again for the same name it goes on with what there is."""
        self._handles[name] = actor = self._remote.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            get_if_exists=True,
            num_gpus=gpus,
            num_cpus=cpus,
            max_restarts=0,
        ).remote()
        identity = {file: base64.b64decode(content) for file, content in order["identity"].items()}
        sent = WorkerOrder(
            order["name"], order["role"], tuple(order["arguments"]), dict(order["environment"]), identity
        )
        host, pid = await self._asked(actor.start.remote(sent))
        return {"host": host, "pid": pid}

    async def wait(self, name: str, timeout_s: float) -> dict[str, Any] | None:
        """Exit status and reason; None while it runs, after `timeout_s`."""
        ended = await self._asked(self._actor(name).wait.remote(timeout_s))
        return None if ended is None else {"status": ended[0], "reason": ended[1]}

    async def terminate(self, name: str) -> None:
        """Ask its process to drain and end."""
        await self._asked(self._actor(name).terminate.remote())

    async def kill(self, name: str) -> None:
        """Kill its process with all that it started."""
        await self._asked(self._actor(name).kill.remote())

    async def remove(self, name: str, is_placed: bool = True) -> None:
        """End the actor and its process; no effect where it is gone. `is_placed`: where that may be."""
        try:
            actor = self._actor(name)
        except ActorGone:
            return
        if is_placed:
            with suppress(TimeoutError, ActorGone):  # one that does not answer takes its child with it
                await asyncio.wait_for(self._asked(actor.kill.remote()), KILL_S)
        self._ray.kill(actor, no_restart=True)
        self._handles.pop(name, None)

    async def actors(self) -> list[str]:
        """Names of all that live in this namespace or wait for a place."""
        return sorted(self._ray.util.list_named_actors())

    async def why_waiting(self, gpus: int, cpus: float) -> str:
        """Why an actor that needs so much has no place yet, in words for the user."""
        needed = {name: count for name, count in (("GPU", gpus), ("CPU", cpus)) if count}
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wants = " and ".join(f"{count:g} {name}" for name, count in needed.items())
        if any(all(node.get(name, 0) >= count for name, count in needed.items()) for node in nodes):
            return f"every node of the Ray cluster that has {wants} is busy, or begins to run it"
        largest = ", ".join(f"{max((node.get(name, 0) for node in nodes), default=0):g} {name}" for name in needed)
        return (
            f"no node of the Ray cluster has {wants}: its {len(nodes)} nodes have {largest} at most; add a node, or "
            "start narrower instances"
        )

    def _actor(self, name: str) -> Any:
        """Raises `ActorGone`."""
        if name not in self._handles:
            try:
                self._handles[name] = self._ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                raise ActorGone("its actor is gone") from None
        return self._handles[name]

    async def _asked(self, answer: Any) -> Any:
        """Raises `ActorGone`; other errors of Ray's may pass."""
        errors = self._ray.exceptions
        try:
            return await answer
        except errors.ActorUnavailableError:
            raise
        except errors.RayActorError as error:
            raise ActorGone(f"its Ray actor died: {last_line(error)}") from error
        except errors.RayTaskError as error:
            raise ActorGone(f"its Ray actor failed: {last_line(error)}") from error


def last_line(error: BaseException) -> str:
    """The last thing that Ray says: what was before is the story of the call."""
    lines = (line.strip() for line in reversed(str(error).splitlines()))
    return next(filter(None, lines), type(error).__name__)[:MAX_REASON_CHARACTERS]


async def serve(driver: RayDriver, calls: asyncio.StreamReader, answers: BinaryIO) -> None:
    """Answer until there are no more calls; each runs beside the others."""
    running: set[asyncio.Task[None]] = set()
    while line := await calls.readline():
        task = asyncio.create_task(_answer(driver, json.loads(line), answers))
        running.add(task)
        task.add_done_callback(running.discard)


async def _answer(driver: RayDriver, call: dict[str, Any], answers: BinaryIO) -> None:
    assert call["call"] in CALLS, call["call"]
    answer: dict[str, Any] = {"id": call["id"]}
    try:
        answer["answer"] = await getattr(driver, call["call"])(**call["arguments"])
    except ActorGone as error:
        answer |= {"error": str(error), "kind": GONE}
    except Exception as error:  # noqa: BLE001  whatever Ray raises, its caller must hear of it
        answer |= {"error": f"{type(error).__name__}: {last_line(error)}", "kind": AWAY}
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


async def _serve_stdin(driver: RayDriver, answers: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await serve(driver, reader, answers)


def _own_address(ray: Any, address: str) -> str:
    """By which nodes of the cluster reach this machine."""
    if not address.startswith(CLIENT_SCHEME):
        return str(ray.util.get_node_ip_address())
    host, _, port = address.removeprefix(CLIENT_SCHEME).rpartition(":")
    family, _, _, _, peer = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect(peer)  # sends nothing
        return str(towards.getsockname()[0])


def main(address: str, namespace: str) -> None:
    """Connect, say where this is and what the cluster has, and serve calls until stdin ends."""
    # What Ray prints is for a log, not for who reads the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import ray

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
        hello: dict[str, Any] = {"host": _own_address(ray, address), "gpus": int(ray.cluster_resources().get("GPU", 0))}
    except Exception as error:  # noqa: BLE001  every failure is the caller's answer
        hello = {"error": f"{type(error).__name__}: {last_line(error)}"}
    answers.write(json.dumps(hello).encode() + b"\n")
    answers.flush()
    if "error" not in hello:
        asyncio.run(_serve_stdin(RayDriver(ray, namespace), answers))


if __name__ == "__main__":
    from mesh.parent_death import end_with_parent_if_asked

    end_with_parent_if_asked()
    main(*sys.argv[1:])
