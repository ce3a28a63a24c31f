"""Store URLs, and the pauses between attempts."""

from pathlib import Path

import pytest

from mesh.errors import ConfigurationError
from mesh.runtime import system_runtime
from mesh.store import open_store
from mesh.store.embedded import EmbeddedStore
from mesh.store.etcd import EtcdStore
from mesh.store.remote import RemoteStore


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("etcd://localhost:2379", EtcdStore),
        ("etcd://one:2379,two:2380,[::1]:2381", EtcdStore),
        ("penstock://127.0.0.1:7000/", RemoteStore),
        ("embedded:", EmbeddedStore),
    ],
)
async def test_each_url_opens_its_store(url: str, kind: type) -> None:
    store = open_store(url, system_runtime())
    assert isinstance(store, kind)
    await store.close()


async def test_an_embedded_store_keeps_a_file(tmp_path: Path) -> None:
    url = f"embedded:{tmp_path / 'state'}"
    store = open_store(url, system_runtime())
    await store.put("a", b"1")
    await store.close()
    store = open_store(url, system_runtime())
    entry = await store.get("a")
    assert entry is not None
    assert entry.value == b"1"
    await store.close()


@pytest.mark.parametrize(
    "url",
    [
        *("", "etcd", "redis://host:1", "http://host:1"),
        *("etcd:host:1", "etcd://", "etcd://host", "etcd://host:0", "etcd://host:99999", "etcd://a:1,,b:2"),
        *("penstock://a:1,b:2", "penstock://:1", "etcd://host:²"),
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        open_store(url, system_runtime())
