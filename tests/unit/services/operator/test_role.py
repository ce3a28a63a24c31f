"""Operators of one mesh: the leader acts, and leaves its pods to the next one."""

import logging
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from prometheus_client import CollectorRegistry

from mesh.errors import ConfigurationError
from mesh.role import RoleContext
from mesh.runtime import system_runtime
from services.operator.role import OperatorRole
from services.operator.settings import OperatorSettings
from tests.unit.services.operator.fake_api_server import NAMESPACE, PODS
from tests.unit.services.operator.mesh_on_cluster import Mesh, model

pytestmark = [pytest.mark.live, pytest.mark.slow]


@pytest.fixture
def kubeconfig(mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the mesh's cluster, where the operator looks for it."""
    path = tmp_path / "kubeconfig"
    written = {
        "clusters": [{"name": "c", "cluster": {"server": mesh.server.url}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(written))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


def context(mesh: Mesh, member_id: str) -> RoleContext:
    nobody = cast(Any, None)  # the operator serves no methods
    return RoleContext(
        "operator", member_id, f"{member_id}, once", "127.0.0.1:1", mesh.store, cast(Any, mesh.workers), nobody,
        CollectorRegistry(), system_runtime(),
    )  # fmt: skip


@pytest.mark.usefixtures("kubeconfig")
async def test_the_next_operator_goes_on_where_the_leader_ended(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mesh.server.apply(model("chat", 1))
    first, second = OperatorRole(OperatorSettings()), OperatorRole(OperatorSettings())
    try:
        assert await first.start(context(mesh, "operator-0")) == {"namespace": NAMESPACE}
        await mesh.has("chat-0")
        await mesh.is_ready("chat", 1)
        await second.start(context(mesh, "operator-1"))
        living = mesh.server.get(PODS, "chat-0")
        await first.drain()
        mesh.server.apply(model("chat", 2))
        await mesh.has("chat-0", "chat-1")
        await mesh.is_ready("chat", 2)
        assert mesh.server.get(PODS, "chat-0") == living
    finally:
        await first.stop()
        await second.stop()
    assert "httpx2" not in {record.name for record in caplog.records}, "a line for each request says nothing"


async def test_without_a_cluster_it_says_what_to_do(mesh: Mesh, kubeconfig: Path) -> None:
    kubeconfig.unlink()
    role = OperatorRole(OperatorSettings())
    with pytest.raises(ConfigurationError, match="say in KUBECONFIG how to reach one"):
        await role.start(context(mesh, "operator-0"))
    await role.stop()
