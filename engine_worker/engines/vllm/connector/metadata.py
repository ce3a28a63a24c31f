"""What the connector's scheduler side passes to its worker side with each step: vLLM's connector metadata."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from engine_worker.engines.vllm.connector.host_copies import HostLoad
from engine_worker.engines.vllm.connector.orders import HeldPrefix, Load, StagingCopy


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    """KV work of one step. Empty, and then false, in nearly all steps."""

    loads: list[Load] = field(default_factory=list)
    fills: list[StagingCopy] = field(default_factory=list)
    unstaged: list[str] = field(default_factory=list)
    """Migrations whose staging memory is not needed after this step."""
    held: list[HeldPrefix] = field(default_factory=list)
    """Prefixes to be published by the ranks, where there are several."""
    broken: list[str] = field(default_factory=list)
    """Exports whose blocks this step overwrites, because the request was preempted."""
    sent: set[str] = field(default_factory=set)
    """Requests whose blocks nobody reads any more."""
    received: set[str] = field(default_factory=set)
    """Carriers whose load is over."""
    failed_blocks: set[int] = field(default_factory=set)
    host_loads: list[HostLoad] = field(default_factory=list)
    """Blocks that come from the host's store, beside the steps to come."""

    def __bool__(self) -> bool:
        return bool(
            self.loads
            or self.fills
            or self.unstaged
            or self.held
            or self.broken
            or self.sent
            or self.received
            or self.host_loads
        )
