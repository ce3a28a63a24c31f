"""The few calls to a Docker engine, over its unix socket; every one has a deadline, and fails with `DockerError`.

The API is that of https://docs.docker.com/reference/api/engine/, in the engine's own version: what is used here has
been the same since 1.25.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import httpx

from mesh.errors import ConfigurationError, DockerError

DEADLINE_S: Final = 30.0
WAIT_S: Final = 60.0
"""How long one call waits for the end of a container."""
LOG_LINES: Final = 200
DEFAULT_ADDRESS: Final = "unix:///var/run/docker.sock"
NOT_FOUND, CONFLICT = 404, 409
_FRAME_BYTES: Final = 8
"""Head of each piece of a log: its stream, three zeros, and its length."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the engine shows it."""

    id: str
    name: str
    labels: Mapping[str, str]
    is_running: bool
    exit_status: int
    """0 for one that runs, or was never started."""
    error: str
    """What the engine says of why it ended or did not start; "" where it says nothing."""


class DockerEngine:
    """The engine of this machine."""

    def __init__(self, address: str) -> None:
        """`address`: unix://PATH. Raises `ConfigurationError` for any other."""
        scheme, _, path = address.partition("://")
        if scheme != "unix" or not path:
            raise ConfigurationError(
                f"DOCKER_HOST is {address!r}: containers are started on this machine, over unix:///PATH of its engine"
            )
        self.address = address
        transport = httpx.AsyncHTTPTransport(uds=path)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://docker", timeout=DEADLINE_S)

    async def close(self) -> None:
        """End the connections to it."""
        await self._client.aclose()

    async def create(self, name: str, config: Mapping[str, Any]) -> str:
        """The id of a container that does not run yet."""
        answer = await self._call("POST", "/containers/create", params={"name": name}, json=dict(config))
        return str(answer.json()["Id"])

    async def start(self, container: str) -> None:
        """No effect on one that runs."""
        await self._call("POST", f"/containers/{container}/start")

    async def send_signal(self, container: str, signal: str) -> None:
        """To its first process; no effect where it has ended or is gone."""
        await self._call("POST", f"/containers/{container}/kill", CONFLICT, NOT_FOUND, params={"signal": signal})

    async def remove(self, container: str) -> None:
        """Kill it if it runs, and forget it with its log; no effect where it is gone or going."""
        params = {"force": "true", "v": "true"}
        await self._call("DELETE", f"/containers/{container}", CONFLICT, NOT_FOUND, params=params)

    async def wait(self, container: str) -> None:
        """Return when it has ended or is gone, or after `WAIT_S`: only `inspect` says which."""
        path, params = f"/containers/{container}/wait", {"condition": "not-running"}
        timeout = httpx.Timeout(DEADLINE_S, read=WAIT_S)
        try:
            await self._call("POST", path, NOT_FOUND, params=params, timeout=timeout)
        except DockerError as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout):
                raise

    async def inspect(self, container: str) -> Container | None:
        """By id or name; None where there is none."""
        answer = await self._call("GET", f"/containers/{container}/json", NOT_FOUND)
        if answer.status_code == NOT_FOUND:
            return None
        shown = answer.json()
        state = shown["State"]
        return Container(
            id=str(shown["Id"]),
            name=str(shown["Name"]).removeprefix("/"),
            labels=shown["Config"].get("Labels") or {},
            is_running=state["Status"] in ("running", "paused", "restarting"),
            exit_status=int(state["ExitCode"]),
            error="it was out of memory (OOMKilled)" if state.get("OOMKilled") else str(state.get("Error") or ""),
        )

    async def labelled(self, label: str, value: str) -> tuple[str, ...]:
        """Ids of all containers, ended ones too, that have this label."""
        filters = json.dumps({"label": [f"{label}={value}"]})
        answer = await self._call("GET", "/containers/json", params={"all": "true", "filters": filters})
        return tuple(str(each["Id"]) for each in answer.json())

    async def log_tail(self, container: str) -> str:
        """The last `LOG_LINES` lines that it wrote; "" where it is gone."""
        params = {"stdout": "true", "stderr": "true", "tail": str(LOG_LINES)}
        answer = await self._call("GET", f"/containers/{container}/logs", NOT_FOUND, params=params)
        return "" if answer.status_code == NOT_FOUND else b"".join(log_pieces(answer.content)).decode(errors="replace")

    async def _call(self, method: str, path: str, *accepted: int, **options: Any) -> httpx.Response:
        """The answer, if it is a success or `accepted`."""
        with _as_docker_errors(self.address):
            answer = await self._client.request(method, path, **options)
        if answer.is_error and answer.status_code not in accepted:
            raise DockerError(_said(answer))
        return answer


def engine_address() -> str:
    """Where `docker` finds the engine, too."""
    return os.environ.get("DOCKER_HOST") or DEFAULT_ADDRESS


def log_pieces(log: bytes) -> Iterator[bytes]:
    """What was written, without the heads of its pieces; the last one may be cut."""
    begins_at = 0
    while begins_at + _FRAME_BYTES <= len(log):
        text_at = begins_at + _FRAME_BYTES
        begins_at = text_at + int.from_bytes(log[begins_at + 4 : text_at], "big")
        yield log[text_at:begins_at]


def _said(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"the Docker engine answered {answer.status_code}"


@contextmanager
def _as_docker_errors(address: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise DockerError(
            f"no Docker engine answers at {address} ({error}): start it, or let this user use its socket, or set "
            "DOCKER_HOST"
        ) from error
    except httpx.HTTPError as error:
        raise DockerError(f"the Docker engine at {address} gave no answer ({type(error).__name__} {error})") from error
