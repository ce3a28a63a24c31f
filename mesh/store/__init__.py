"""The state store: durable intent and membership behind one interface."""

from pathlib import Path

from mesh.errors import ConfigurationError
from mesh.runtime import Runtime
from mesh.store.interface import KeyValue, Listing, StateStore, WatchEvent
from mesh.store.lease import Lease, LeaseLoss

__all__ = ["KeyValue", "Lease", "LeaseLoss", "Listing", "StateStore", "WatchEvent", "open_store"]

_FORMS = "etcd://HOST:PORT[,HOST:PORT...], etcds:// with TLS, penstock://HOST:PORT or embedded:[FILE]"


def open_store(url: str, runtime: Runtime) -> StateStore:
    """The store behind a URL; call it on the event loop that will use it. Connects when first used.

    `etcd://HOST:PORT[,HOST:PORT...]`, `etcds://` the same with TLS and this process's identity,
    `penstock://HOST:PORT` (the store served by another Penstock process), or
    `embedded:` (inside this process; `embedded:FILE` keeps the keys without a lease in FILE). Raises
    `ConfigurationError` for any other URL.
    """
    scheme, colon, rest = url.partition(":")
    match scheme if colon else "":
        case "etcd" | "etcds":
            from mesh.store.etcd import EtcdStore

            return EtcdStore(_endpoints(url, rest), runtime, tls=scheme == "etcds")
        case "penstock":
            from mesh.store.remote import RemoteStore

            endpoints = _endpoints(url, rest)
            if len(endpoints) > 1:
                raise ConfigurationError(f"{url!r}: penstock:// takes one HOST:PORT")
            return RemoteStore(endpoints[0], runtime)
        case "embedded":
            from mesh.store.embedded import EmbeddedStore
            from mesh.store.host import StoreHost

            return EmbeddedStore(StoreHost(runtime.clock, runtime.entropy, Path(rest) if rest else None))
        case _:
            raise ConfigurationError(f"{url!r} is no store URL; use {_FORMS}")


def _endpoints(url: str, rest: str) -> list[str]:
    endpoints = rest.removeprefix("//").removesuffix("/").split(",")
    for endpoint in endpoints:
        host, _, port = endpoint.rpartition(":")
        if not rest.startswith("//") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigurationError(f"{url!r} is no store URL; use {_FORMS}")
    return endpoints
