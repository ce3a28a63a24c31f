"""A Kubernetes of its own for all tests of this folder, with a kubelet that runs `penstock serve`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.cluster import BINARIES, PROGRAMS, Cluster
from tests.mesh.store.etcd_process import find_etcd

ROOT: Final = Path(__file__).resolve().parents[2]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.kubernetes)


@pytest.fixture(scope="session")
def etcd() -> str:
    """The program."""
    found = find_etcd()
    if found is None:
        pytest.skip("etcd is not there; `make test-kubernetes` fetches it")
    return found


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, etcd: str) -> Iterator[Cluster]:
    """Running."""
    for program in PROGRAMS:
        if not (BINARIES / program).exists():
            pytest.skip(f"{BINARIES / program} is not there; `make test-kubernetes` builds it")
    running = Cluster(tmp_path_factory.mktemp("kubernetes"), etcd)
    try:
        running.start()
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[ApiServer]:
    """Asked as the cluster's administrator."""
    asked = cluster.administrator()
    yield asked
    asked.close()
