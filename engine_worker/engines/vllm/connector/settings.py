"""What the connector is told in vLLM's `kv_connector_extra_config`: by a worker that starts the engine core, or by
whoever starts a server to which a worker is attached. Pure."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from engine_worker.engines.vllm.connector.endpoint import UNIX, check_endpoint, of_core
from engine_worker.engines.vllm.connector.staging import STAGING_BLOCKS
from mesh.errors import ConfigurationError

CONNECTOR_CLASS: Final = "PenstockConnector"
CONNECTOR_MODULE: Final = "engine_worker.engines.vllm.connector.connector"


class ConnectorSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of one engine core."""

    endpoint: str
    """Of the control channel."""
    listens: bool = False
    """Whether workers come to the endpoint; else it is the one worker's."""
    device: str
    host: str
    """Where the KV transfer agent listens."""
    port: int
    model: str
    """Name that peers compare."""
    staging_blocks: int = STAGING_BLOCKS
    host_key: str = ""
    """Of the host's store (see `host_key`); empty: there is none."""
    host_kv_bytes: int = 0
    host_kv_dir: str = ""
    disk_kv: str = ""

    def of_core(self, core: int, ranks: int) -> "ConnectorSettings":
        """As the core of this number has them, of several of `ranks` ranks each."""
        # UCX takes the port above each, too.
        port = self.port and self.port + 2 * ranks * core
        return msgspec.structs.replace(self, endpoint=of_core(self.endpoint, core), port=port)


class _Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is written by hand, in the flags of `vllm serve`."""

    control: str
    kv_host: str = "127.0.0.1"
    kv_port: int = 0


def connector_settings(
    extra: Mapping[str, Any], *, model: str, device: str, is_spread: bool, token: str
) -> ConnectorSettings:
    """From the extra configuration of an own engine core, or of a server that runs by itself: that one has `control`,
    the endpoint to listen on, and maybe `kv_host` and `kv_port`.

    `is_spread`: the model does not run in the engine core's own process. Raises `ConfigurationError`.
    """
    try:
        if "control" not in extra:
            return msgspec.convert(dict(extra), ConnectorSettings)
        served = msgspec.convert(dict(extra), _Served, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"kv_connector_extra_config: {error}; it has control, kv_host and kv_port") from error
    check_endpoint(served.control, token)
    if is_spread and not served.control.startswith(UNIX):
        raise ConfigurationError(
            f"the model is spread over several processes, which find each other beside the control socket: give "
            f"{UNIX}/PATH instead of {served.control}"
        )
    return ConnectorSettings(
        endpoint=served.control,
        listens=True,
        device=device,
        host=served.kv_host,
        port=served.kv_port,
        model=Path(model).name,
    )
