"""Where a server that runs by itself may have its control socket, and what guards it. Pure."""

from typing import Final

from mesh.errors import ConfigurationError

TOKEN_VARIABLE: Final = "PENSTOCK_ATTACH_CONTROL_TOKEN"
"""Of the server and of the worker: what a worker has to know to be let in. Must be set where the endpoint is TCP's."""
UNIX: Final = "ipc://"
"""Endpoints of unix sockets begin so."""


def of_core(endpoint: str, core: int) -> str:
    """That of one engine core of several by data parallelism, as vLLM counts, too; the first one's is the endpoint
    itself."""
    if core == 0 or not endpoint:
        return endpoint
    if endpoint.startswith(UNIX):
        return f"{endpoint}_dp{core}"
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + core}"


def check_endpoint(endpoint: str, token: str) -> None:
    """Raises `ConfigurationError` unless only this machine's own users reach it."""
    if endpoint.startswith(UNIX) and len(endpoint) > len(UNIX):
        return
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if not endpoint.startswith("tcp://") or host not in ("127.0.0.1", "[::1]"):
        raise ConfigurationError(
            f"{endpoint!r} is no control endpoint: give ipc:///PATH, or tcp://127.0.0.1:PORT with {TOKEN_VARIABLE}"
        )
    if not token:
        raise ConfigurationError(
            f"set {TOKEN_VARIABLE} for server and worker: all users of the machine reach {endpoint}"
        )
