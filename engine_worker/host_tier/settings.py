"""How much memory of the host KV blocks are given, and where."""

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final, TypeAlias

from engine_worker.host_tier.disk_store import DiskStore, open_disk_store
from engine_worker.host_tier.shared_memory import LOCK_S, UNUSED_S, SharedMemory, remove_stores
from engine_worker.host_tier.store import HostStore
from mesh.errors import ConfigurationError, HostTierUnavailable
from mesh.runtime import SystemThreads, Threads

log = logging.getLogger(__name__)

UNUSED_ON_DISK_S: Final = 30 * 86_400.0
"""As `UNUSED_S`, of stores on disk."""
_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True)
class HostTierSettings:
    """Of one instance. By default it has no host tier: that memory is the machine's, which serves others too, and in a
    container it counts towards the limit at which the container is killed."""

    nbytes: int = 0
    """Of the store that it shares with others; 0: none."""
    directory: str = ""
    """Empty: `default_directory`."""
    disk_nbytes: int = 0
    """Of the store on disk behind it; 0: none."""
    disk_directory: str = ""
    """Empty: `default_disk_directory`."""


NO_HOST_TIER: Final = HostTierSettings()

OpenStore: TypeAlias = Callable[[str, int, HostTierSettings], HostStore]
"""Of blocks of one model and layout (any text that tells them from others) and of so many bytes each. Raises
`HostTierUnavailable`."""

OpenDisk: TypeAlias = Callable[[str, int, HostTierSettings], DiskStore | None]
"""The store on disk behind that of an `OpenStore`; None where there is to be none, or none can be had."""


def parse_bytes(text: str) -> int:
    """8GiB, 512MiB, 8G, 1000000; empty: 0. Raises ConfigurationError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if text.strip() and not found:
        raise ConfigurationError(f"{text!r} is no number of bytes: say 8GiB, 512MiB or 1000000")
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def host_tier_settings(host_kv: str, host_kv_dir: str, disk_kv: str) -> HostTierSettings:
    """What the worker's options say. Raises ConfigurationError."""
    nbytes, (disk_nbytes, disk_directory) = parse_bytes(host_kv), parse_disk(disk_kv)
    if disk_nbytes and not nbytes:
        raise ConfigurationError("--disk-kv keeps what the memory of the host has no room for: give --host-kv as well")
    return HostTierSettings(nbytes, host_kv_dir, disk_nbytes, disk_directory)


def parse_disk(text: str) -> tuple[int, str]:
    """64GiB, or 64GiB:/var/tmp/kv with its directory; empty: none. Raises ConfigurationError."""
    size, _, directory = text.partition(":")
    if directory and not Path(directory).is_absolute():
        raise ConfigurationError(f"{text!r}: the directory of the disk tier is to be absolute, as in 64GiB:/var/tmp/kv")
    return parse_bytes(size), directory


def default_disk_directory() -> Path:
    """One of this user's that outlives a restart of the machine."""
    return Path("/var/tmp") / f"penstock-kv-{os.getuid()}"


def default_directory() -> Path:
    """One of this user's in the machine's shared memory."""
    return Path("/dev/shm") / f"penstock-kv-{os.getuid()}"


def directory_of_mesh(name: str) -> Path:
    """For the mesh of this name that `penstock up` runs: its own, so that it can be removed with it."""
    directory = default_directory()
    return directory.with_name(f"{directory.name}-{name}")


def open_store(
    key: str, block_bytes: int, settings: HostTierSettings, *, only_looks: bool = False, lock_s: float = LOCK_S
) -> HostStore:
    """An `OpenStore`: that of this machine. `only_looks`: see `HostStore`; `lock_s`: how long to wait for its lock."""
    directory = Path(settings.directory) if settings.directory else default_directory()
    memory = SharedMemory(directory, _file_name(key, block_bytes), block_bytes, settings.nbytes, lock_s=lock_s)
    store = HostStore(memory, only_looks=only_looks)
    remove_stores(directory, UNUSED_S)
    return store


def open_disk(
    key: str, block_bytes: int, settings: HostTierSettings, *, only_looks: bool = False, lock_s: float = LOCK_S
) -> DiskStore | None:
    """The store on disk behind that of `open_store`; None, and an error in the log, where it cannot be opened, and None
    where there is to be none."""
    if not settings.disk_nbytes:
        return None
    directory = Path(settings.disk_directory) if settings.disk_directory else default_disk_directory()
    name = _file_name(key, block_bytes)
    try:
        store = open_disk_store(
            directory, name, block_bytes, settings.disk_nbytes, only_looks=only_looks, lock_s=lock_s
        )
    except HostTierUnavailable as error:
        log.error("there is no disk tier", extra={"error": str(error)})
        return None
    remove_stores(directory, UNUSED_ON_DISK_S)
    return store


def _file_name(key: str, block_bytes: int) -> str:
    return sha256(f"{key}/{block_bytes}".encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True)
class HostStores:
    """Where an engine has its stores from; the defaults are those of this machine."""

    open: OpenStore = open_store
    open_disk: OpenDisk = open_disk
    threads: Threads = field(default_factory=SystemThreads)
    """On which the disk is waited for."""


OF_THIS_MACHINE: Final = HostStores()
