"""What the connector's scheduler side passes to its worker side with each step: vLLM's connector metadata."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


@dataclass(frozen=True, slots=True)
class Load:
    """Pull a carrier's blocks from a peer, beside the steps to come."""

    carrier_id: str
    """vLLM's id of the carrier."""
    load_id: str
    """The worker process's id of the load."""
    migration_id: str
    peer: str
    peer_block_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class StagingCopy:
    """Copy staged blocks into a request's blocks, before the step."""

    staging_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass
class ConnectorMetadata(KVConnectorMetadata):
    """KV work of one step. Empty, and then false, in nearly all steps."""

    loads: list[Load] = field(default_factory=list)
    fills: list[StagingCopy] = field(default_factory=list)
    unstaged: list[str] = field(default_factory=list)
    """Migrations whose staging memory is not needed after this step."""
    broken: list[str] = field(default_factory=list)
    """Exports whose blocks this step overwrites, because the request was preempted."""
    sent: set[str] = field(default_factory=set)
    """Requests whose blocks nobody reads any more."""
    received: set[str] = field(default_factory=set)
    """Carriers whose load is over."""
    failed_blocks: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.loads or self.fills or self.unstaged or self.broken or self.sent or self.received)
