"""The stores under test; those on etcd are skipped where no etcd is found."""

import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from mesh.store import StateStore
from tests.mesh.store.backends import Backend, EmbeddedBackend, EtcdBackend, RemoteBackend
from tests.mesh.store.etcd_process import EtcdProcess, find_etcd
from tests.mesh.store.proxy import Proxy

_roots = (f"test{number}/" for number in itertools.count())
_etcd = pytest.param("etcd", marks=pytest.mark.etcd)


@pytest.fixture(scope="session")
def etcd_binary() -> str:
    binary = find_etcd()
    if binary is None:
        pytest.skip("no etcd on PATH or beside this Python; scripts/install_etcd.sh installs one")
    return binary


@pytest.fixture(scope="session")
def lasting_etcd(etcd_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for all tests that leave it running."""
    process = EtcdProcess(etcd_binary, tmp_path_factory.mktemp("etcd"))
    process.start()
    yield process
    process.kill()


@pytest.fixture
def own_process(etcd_binary: str, tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd that the test may kill."""
    process = EtcdProcess(etcd_binary, tmp_path)
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def own_etcd(own_process: EtcdProcess) -> AsyncIterator[EtcdBackend]:
    backend = await _serving(own_process)
    yield backend
    await backend.close()


@pytest.fixture(params=["embedded", "remote", _etcd])
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[Backend]:
    backend: Backend
    if request.param == "embedded":
        backend = EmbeddedBackend()
    elif request.param == "remote":
        backend = remote = RemoteBackend()
        await remote.start()
    else:
        backend = await _serving(request.getfixturevalue("lasting_etcd"))
    yield backend
    await backend.close()


@pytest.fixture
def store(backend: Backend) -> StateStore:
    return backend.store()


@pytest.fixture
def root() -> str:
    """A prefix that no other test writes under."""
    return next(_roots)


@pytest.fixture(params=["remote", _etcd])
async def mortal(request: pytest.FixtureRequest) -> AsyncIterator[RemoteBackend | EtcdBackend]:
    """A store behind a network, which the test may kill, restart and rob of its data."""
    backend: RemoteBackend | EtcdBackend
    if request.param == "etcd":
        backend = await _serving(request.getfixturevalue("own_process"))
    else:
        backend = RemoteBackend()
        await backend.start()
    yield backend
    await backend.close()


@pytest.fixture
async def proxy(mortal: RemoteBackend | EtcdBackend) -> AsyncIterator[Proxy]:
    proxy = Proxy(mortal.port)
    await proxy.restore()
    yield proxy
    await proxy.cut()


async def _serving(process: EtcdProcess) -> EtcdBackend:
    backend = EtcdBackend(process)
    await backend.store().get("ready", timeout_s=20)
    return backend
