"""What the scheduler side has the worker side do with a step."""

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """Let peers read the blocks of a held prefix."""

    hold_id: str
    block_ids: tuple[int, ...]
