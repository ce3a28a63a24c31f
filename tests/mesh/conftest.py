"""One simulated mesh for the tests that leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.mesh.running_mesh import RunningMesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Three simulated instances of demo-large behind one endpoint."""
    running = RunningMesh(tmp_path_factory.mktemp("mesh"), "--engine", "simulated")
    try:
        running.wait_until_serving()
        yield running
        assert running.stop() == 0
    finally:
        running.cut()
