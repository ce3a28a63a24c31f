"""Descriptions and statistics of transfer agents, as values that travel between processes."""

from dataclasses import dataclass

from engine_worker.kv.layout import KvLayout
from engine_worker.kv.settings import KvTransferSettings


@dataclass(frozen=True, slots=True)
class AgentDescription:
    """Of one agent, for its life, but for the port."""

    agent_id: str
    port: int
    """As of now; see `AgentStatus.port`."""
    layout: KvLayout
    settings: KvTransferSettings
    more_ports: tuple[int, ...] = ()
    """Of the agents of the other ranks, in their order; `layout` is then that of all together."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Size and duration of one pull that succeeded."""

    transfer_id: str
    blocks: int
    nbytes: int
    messages: int
    waited_s: float
    """For a slot and the connection."""
    duration_s: float
    """From the call to its end, waiting for a slot included."""


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """What the agent of one rank does, of an instance that has several."""

    core: int
    """The engine core that the rank is of (data parallelism), from 0."""
    rank: int
    """Within its core, as vLLM counts: tensor parallel ones next to each other."""
    port: int
    obstacle: str
    """Why no block can be moved to or from this rank; empty if it can."""
    pulling: int
    serving: int
    exported_blocks: int
    pulls_total: int
    failed_pulls_total: int
    pulled_bytes_total: int


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """An agent's transfers that run and wait now, and totals since its start."""

    pulling: int
    pull_queue: int
    serving: int
    serve_queue: int
    connections: int
    exports: tuple[str, ...]
    exported_blocks: int
    pulls_total: int
    """Pulls that succeeded."""
    failed_pulls_total: int
    pulled_bytes_total: int
    pull_seconds_total: float
    """Duration of all pulls that succeeded, waiting for a slot included."""
    port: int = 0
    """Where peers connect now: it may have changed when the agent was opened anew."""
    obstacle: str = ""
    """Why no block can be moved to or from here; empty if it can."""
    reopened_total: int = 0
    """Times that the agent was opened anew."""
    rejected_total: int = 0
    """Connections and pulls that came without the token of what is exported."""
    more_ports: tuple[int, ...] = ()
    """Of the agents of the other ranks, in their order."""
    ranks: tuple[RankTransfers, ...] = ()
    """Each of them by itself; empty where there is one."""

    def of_rank(self, core: int, rank: int) -> RankTransfers:
        """As that of one rank among others."""
        return RankTransfers(
            core,
            rank,
            self.port,
            self.obstacle,
            self.pulling,
            self.serving,
            self.exported_blocks,
            self.pulls_total,
            self.failed_pulls_total,
            self.pulled_bytes_total,
        )
