"""What the bridge tells the scheduler side, which reads it with every step."""

from dataclasses import dataclass
from typing import TypeAlias

from engine_worker.engines.vllm.connector.host_copies import HostEvent


@dataclass(frozen=True, slots=True)
class Exported:
    """To the scheduler side: publish the request's blocks."""

    migration_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Unexported:
    """To the scheduler side: publish no more of them."""

    migration_id: str


@dataclass(frozen=True, slots=True)
class Sent:
    """To the scheduler side: nobody reads the request's blocks any more."""

    internal_id: str


@dataclass(frozen=True, slots=True)
class Received:
    """To the scheduler side: a carrier's load is over."""

    carrier_id: str
    failed_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hurried:
    """To the scheduler side: pin what there is of a prefix."""

    hold_id: str


@dataclass(frozen=True, slots=True)
class Unheld:
    """To the scheduler side: nobody reads the blocks of a hold any more."""

    hold_id: str


InboxEvent: TypeAlias = Exported | Unexported | Sent | Received | Hurried | Unheld | HostEvent
