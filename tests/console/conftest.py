"""One browser for all, and one small mesh with keys."""

import hashlib
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.frontend.requests.api_keys import new_key_line
from tests.console.browser import browser as open_browser
from tests.console.browser import chromium
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    with open_browser() as running:
        yield running


@dataclass
class KeyedMesh:
    """Three simulated instances, an operator's key and a client's."""

    mesh: RunningMesh
    operator: str
    client: str
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(16))

    def ask(self, prompt: str, tokens: int = 40) -> tuple[int, str]:
        """Status, and the mesh's id of the request."""
        body = {"model": "demo-large", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.mesh.url}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {self.client}"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["x-penstock-request-id"]

    def load(self, requests: int, tokens: int = 40) -> list[Future[tuple[int, str]]]:
        """So many at once."""
        return [self.pool.submit(self.ask, f"request {number % 3} " * 30, tokens) for number in range(requests)]

    def wait_whole(self) -> None:
        """Until all three instances are placed on."""
        eventually(lambda: list(self.mesh.instances().values()) == ["ready"] * 3, 60, "all instances are ready")


@pytest.fixture(scope="session")
def keyed_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedMesh]:
    chromium()  # before a mesh is started for nothing
    folder = tmp_path_factory.mktemp("console")
    lines = [
        new_key_line(name, hashlib.sha256(name.encode()).digest(), is_operator=name == "ops") for name in ("ops", "app")
    ]
    (folder / "keys").write_text("\n".join(line for _, line in lines))
    environment = {"PENSTOCK_SERVE_FRONTEND_API_KEYS_FILE": str(folder / "keys")}
    running = RunningMesh(folder, "--engine", "simulated", environment=environment)
    try:
        running.wait_until_serving()
        mesh = KeyedMesh(running, *(key for key, _ in lines))
        yield mesh
        mesh.pool.shutdown()
        assert running.stop() == 0
    finally:
        running.cut()
