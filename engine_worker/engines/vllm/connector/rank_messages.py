"""What the engine core and the processes of its ranks say to each other about KV, where a model is spread over several.
MessagePack over a ZeroMQ socket of the machine; order is kept between two."""

from typing import TypeAlias

import msgspec

from engine_worker.engines.vllm.connector.orders import Load
from engine_worker.kv.transfer import AgentDescription, AgentStatus, TransferStats


class _Message(msgspec.Struct, frozen=True, tag=True):
    pass


class RankExport(_Message, frozen=True):
    """Let peers read this rank's part of more blocks."""

    export_id: str
    block_ids: tuple[int, ...]
    kv_token: str


class RankWithdraw(_Message, frozen=True):
    """Answered when no peer reads this rank's part any more."""

    export_id: str


class RankPull(_Message, frozen=True):
    """Pull this rank's part of blocks. Answered with `RankPulled`, or when it is at rest again."""

    peer: str
    transfer_id: str
    source_block_ids: tuple[int, ...]
    target_block_ids: tuple[int, ...]
    deadline_s: float


class RankCancel(_Message, frozen=True):
    """End a pull that is under way, which is answered as ever."""

    number: int


class RankAskStatus(_Message, frozen=True):
    """Answered with `RankStatus`."""


class RankCapture(_Message, frozen=True):
    """Send every `every_steps`-th step's hidden states, 0: none; `RankStates` follow from the one rank that has them.
    Answered with `RankCapturing`."""

    every_steps: int


RankCommand: TypeAlias = RankExport | RankWithdraw | RankPull | RankAskStatus | RankCapture


class RankCall(_Message, frozen=True):
    """A command and the number that its answer will bear."""

    number: int
    command: RankCommand


ToRank: TypeAlias = RankCall | RankCancel


class RankPulled(_Message, frozen=True):
    """Answer to `RankPull`."""

    stats: TransferStats


class RankStatus(_Message, frozen=True):
    """Answer to `RankAskStatus`."""

    agent: AgentStatus


class RankCapturing(_Message, frozen=True):
    """Answer to `RankCapture`: why that cannot be done here; empty if it can, or if another rank has the states."""

    obstacle: str


RankValue: TypeAlias = RankPulled | RankStatus | RankCapturing


class RankHello(_Message, frozen=True):
    """The first message of a rank: its agent listens."""

    rank: int
    agent: AgentDescription


class RankAnswer(_Message, frozen=True):
    """Answer to a `RankCall`. `error` is the name of a class of `mesh.errors`, or `Cancelled`; empty for success."""

    rank: int
    number: int
    value: RankValue | None = None
    error: str = ""
    message: str = ""


class LoadReady(_Message, frozen=True):
    """The step that begins a load has come to this rank: the blocks to be filled are used no more."""

    rank: int
    order: Load


class HoldReady(_Message, frozen=True):
    """The step that publishes a held prefix has come to this rank: all its blocks are computed."""

    rank: int
    hold_id: str
    block_ids: tuple[int, ...]


class Unstaged(_Message, frozen=True):
    """This rank has copied what was staged for a migration, or never will."""

    rank: int
    migration_id: str


class RankStates(_Message, frozen=True):
    """Hidden states of a step, as `hidden_states.message` has them."""

    rank: int
    content: bytes


RankEvent: TypeAlias = LoadReady | HoldReady | Unstaged
FromRank: TypeAlias = RankHello | RankAnswer | LoadReady | HoldReady | Unstaged | RankStates
