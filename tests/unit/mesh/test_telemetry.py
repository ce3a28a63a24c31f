"""The metrics port over HTTP, and what it says of health."""

from collections.abc import Iterator
from http.client import HTTPConnection

import pytest
from prometheus_client import CollectorRegistry, Counter

from mesh.errors import ConfigurationError
from mesh.rpc.server import RpcServer
from mesh.runtime import system_runtime
from mesh.telemetry import MetricsPort

pytestmark = pytest.mark.live


@pytest.fixture
def port() -> Iterator[MetricsPort]:
    registry = CollectorRegistry()
    Counter("seen", "What was seen.", registry=registry).inc(3)
    made = MetricsPort("127.0.0.1", 0, registry)
    yield made
    made.close()


def get(port: MetricsPort, path: str) -> tuple[int, str]:
    connection = HTTPConnection(port.address, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    content = answer.read().decode()
    connection.close()
    return answer.status, content


def test_metrics_are_told_at_any_other_path(port: MetricsPort) -> None:
    for path in ("/metrics", "/", "/readiness"):
        status, content = get(port, path)
        assert status == 200
        assert "seen_total 3.0" in content


def test_a_process_that_has_not_said_so_is_not_ready(port: MetricsPort) -> None:
    assert get(port, "/ready") == (503, "not serving\n")
    port.set_health("", True)
    assert get(port, "/ready") == (200, "serving\n")
    assert get(port, "/ready/readiness")[0] == 503, "each name for itself"
    port.set_health("readiness", True)
    port.set_health("", False)
    assert [get(port, path)[0] for path in ("/ready", "/ready/readiness")] == [503, 200]


async def test_it_hears_of_health_what_grpc_tells() -> None:
    told: dict[str, bool] = {}
    server = RpcServer(system_runtime().transport, on_health=told.__setitem__)
    server.name_health("readiness")
    await server.start()
    assert told == {"": False, "readiness": False}
    await server.set_serving(True)
    await server.set_health("readiness", False)
    assert told == {"": True, "readiness": False}
    await server.stop(0.0)


def test_a_port_that_is_taken_is_said(port: MetricsPort) -> None:
    with pytest.raises(ConfigurationError, match="choose another --metrics-port"):
        MetricsPort("127.0.0.1", int(port.address.rpartition(":")[2]), CollectorRegistry())
