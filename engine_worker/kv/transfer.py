"""What an agent says about itself and its transfers."""

from dataclasses import dataclass

from engine_worker.kv.layout import KvLayout
from engine_worker.kv.settings import KvTransferSettings


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """Of one agent, for its life."""

    agent_id: str
    port: int
    layout: KvLayout
    settings: KvTransferSettings


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Of one pull that succeeded."""

    transfer_id: str
    blocks: int
    nbytes: int
    messages: int
    waited_s: float
    """For a slot and the connection."""
    duration_s: float
    """With the wait."""


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Of one agent, now."""

    pulling: int
    pull_queue: int
    serving: int
    serve_queue: int
    connections: int
    exports: tuple[str, ...]
    exported_blocks: int
    pulls_total: int
    """That succeeded."""
    failed_pulls_total: int
    pulled_bytes_total: int
    pull_seconds_total: float
    """Of those that succeeded, with their waits."""
