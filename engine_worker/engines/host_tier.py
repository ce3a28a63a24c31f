"""The interface of an engine whose KV blocks stay in the memory of its host."""

from typing import Protocol, TypeGuard

from engine_worker.engines.interface import Engine
from engine_worker.host_tier.disk_store import DiskStore
from engine_worker.host_tier.store import HostStore


class HostTierEngine(Engine, Protocol):
    """What it loads and what that takes is in its load report."""

    @property
    def host_store(self) -> HostStore | None:
        """The store that it saves blocks to and loads them from, once it is started, for its worker to follow; None if
        it has none."""

    @property
    def disk_store(self) -> DiskStore | None:
        """That on disk behind it, likewise."""


def has_host_tier(engine: Engine) -> TypeGuard[HostTierEngine]:
    """Whether the class of this engine can have such a store at all."""
    return hasattr(type(engine), "host_store")
