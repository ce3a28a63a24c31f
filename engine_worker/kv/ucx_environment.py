"""The one place that sets UCX's environment and imports it."""

import importlib
import os
from collections.abc import MutableMapping
from types import ModuleType

from engine_worker.kv.settings import Device
from mesh.errors import ConfigurationError

UCX_PACKAGE = "ucxx-cu13==0.52.0"


def ucx_environment(device: Device) -> dict[str, str]:
    """What UCX must find when it is imported, unless the operator has set it already."""
    variables = {
        # Shared memory between processes of one machine, TCP between machines. Without their error handling both
        # shared-memory transports are dropped silently, because our endpoints ask for it.
        "UCX_TLS": "tcp,posix,sysv,self",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        # UCX looks this often whether the peers still exist whose shared memory it uses (by default every 20 s).
        "UCX_KEEPALIVE_INTERVAL": "1s",
        # Peers die; every such error is raised here, with the peer's name.
        "UCXX_LOG_LEVEL": "FATAL",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
    if device == "cuda":
        variables["UCX_TLS"] += ",cuda_copy,cuda_ipc"
    else:
        # UCX's older protocols: 1.3 times the throughput between host memories.
        variables["UCX_PROTO_ENABLE"] = "n"
    return variables


def load_ucx(device: Device, environ: MutableMapping[str, str] = os.environ) -> ModuleType:
    """UCX's Python binding. Raises `ConfigurationError` if it is not installed.

    UCX reads its environment when it is first loaded: a process has KV memory of one kind only.
    """
    for name, value in ucx_environment(device).items():
        environ.setdefault(name, value)
    try:
        return importlib.import_module("ucxx")
    except ImportError as error:
        raise ConfigurationError(
            f"KV transfers need UCX, which cannot be imported ({error}): pip install {UCX_PACKAGE}, or start the "
            "worker without KV transfers"
        ) from error
