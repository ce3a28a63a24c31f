"""The one place that sets UCX's environment and imports it."""

import importlib
import os
from collections.abc import MutableMapping
from types import ModuleType

from engine_worker.kv.devices import rdma_devices
from engine_worker.kv.settings import Device
from mesh.errors import ConfigurationError

UCX_PACKAGE = "ucxx-cu13==0.52.0"


def ucx_environment(device: Device, *, has_rdma: bool) -> dict[str, str]:
    """What UCX must find when it is imported, unless the operator has set it already. `has_rdma`: this machine has RDMA
    cards."""
    variables = {
        # Shared memory between processes of one machine, RDMA or else TCP between machines. Without their error
        # handling both shared-memory transports are dropped silently, because our endpoints ask for it; that of RDMA
        # and TCP is always on. Naming transports keeps out cma, which has none, and with it the memory it would read.
        "UCX_TLS": "tcp,posix,sysv,self",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        # UCX looks this often whether the peers still exist whose shared memory it uses (by default every 20 s).
        "UCX_KEEPALIVE_INTERVAL": "1s",
        # Peers die; every such error is raised here, with the peer's name.
        "UCXX_LOG_LEVEL": "FATAL",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if has_rdma:
        # Named only where they are: UCX complains of others.
        variables["UCX_TLS"] += ",rc,dc"
    if device == "cuda":
        variables["UCX_TLS"] += ",cuda"
        # The KV cache is one allocation or a few, and each is registered whole when its first block is sent (UCX's own
        # default, which KV transfers depend on).
        variables["UCX_MEMTYPE_REG_WHOLE_ALLOC_TYPES"] = "cuda"
    else:
        # UCX's older protocols: 1.3 times the throughput between host memories.
        variables["UCX_PROTO_ENABLE"] = "n"
    return variables


def shared_memory_transports(transports: str) -> list[str]:
    """Those that several peers send through at once, of what `UCX_TLS` allows."""
    allowed = set(transports.split(","))
    return [name for name in ("posix", "sysv") if allowed & {name, "mm", "sm", "shm", "all"}]


def load_ucx(device: Device, environ: MutableMapping[str, str] = os.environ) -> ModuleType:
    """UCX's Python binding. Raises `ConfigurationError` if it is not installed.

    UCX reads its environment when it is first loaded: a process has KV memory of one kind only.
    """
    for name, value in ucx_environment(device, has_rdma=bool(rdma_devices())).items():
        environ.setdefault(name, value)
    try:
        return importlib.import_module("ucxx")
    except ImportError as error:
        raise ConfigurationError(
            f"KV transfers need UCX, which cannot be imported ({error}): pip install {UCX_PACKAGE}, or start the "
            "worker without KV transfers"
        ) from error


def has_cuda_transport(ucx: ModuleType) -> bool:
    """Whether UCX, as it is installed and set up here, sends and receives buffers of a GPU's memory."""
    return bool(ucx.libucxx.UCXContext({}).cuda_support)
