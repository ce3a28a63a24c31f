"""Structured logs, and the port of metrics and readiness."""

import json
import logging
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final
from wsgiref.simple_server import WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, start_http_server

from mesh.errors import ConfigurationError

_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, role, logger, message, what `extra` held, and the traceback."""

    def __init__(self, role: str, member_id: str) -> None:
        super().__init__()
        self._fixed = {"role": role, "member_id": member_id}

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._fixed,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update({key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up_logs(role: str, member_id: str, level: str) -> None:
    """Send every record of this process to stderr as JSON; `level` is a standard level's name in any case."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role, member_id))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


READY: Final = "/ready"
"""Answered 200 while the process serves and 503 while it does not; `/ready/NAME` for a health of another name."""


class MetricsPort:
    """The Prometheus endpoint of one process, on a thread of its own: a busy event loop is still seen.

    It tells the process's health over HTTP besides, for those who cannot ask gRPC with an identity: the kubelet's gRPC
    probe speaks no TLS, and in a container a gRPC client would be started for every look.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Port 0 takes a free one. Raises ConfigurationError if it cannot be bound."""
        try:
            server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for metrics ({error}); choose another --metrics-port"
            ) from error
        self._server: WSGIServer = server
        metrics = server.get_app()
        assert metrics is not None, "the library has set one"
        self._metrics = metrics
        self._serving: dict[str, bool] = {}
        server.set_app(self._answer)
        self.address = f"{host}:{server.server_port}"

    def set_health(self, name: str, serving: bool) -> None:
        """Of the process ("") or another name; not serving until told."""
        self._serving[name] = serving

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = str(environ.get("PATH_INFO", ""))
        if path != READY and not path.startswith(f"{READY}/"):
            return self._metrics(environ, start_response)
        serving = self._serving.get(path.removeprefix(READY).removeprefix("/"), False)
        status = "200 OK" if serving else "503 Service Unavailable"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [b"serving\n" if serving else b"not serving\n"]
