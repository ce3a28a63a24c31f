"""Structured logs and the metrics port."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any
from wsgiref.simple_server import WSGIServer

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


class MetricsPort:
    """The Prometheus endpoint of one process, on a thread of its own: a busy event loop is still seen."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Port 0 takes a free one. Raises ConfigurationError if it cannot be bound."""
        try:
            server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port} for metrics ({error}); choose another --metrics-port"
            ) from error
        self._server: WSGIServer = server
        self.address = f"{host}:{server.server_port}"

    def close(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=1.0)
