"""Which bytes travel in which message. Pure: both sides compute it and need not tell each other."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from mesh.errors import KvTransferRefused


class Run(NamedTuple):
    """Blocks that are consecutive on both sides."""

    source_block: int
    target_block: int
    blocks: int


class Piece(NamedTuple):
    """Blocks of a run in one region."""

    region: int
    run: int
    first_block: int
    """Counted from the run's first."""
    blocks: int


class Message(NamedTuple):
    """The blocks that one message carries, in this order."""

    pieces: tuple[Piece, ...]
    nbytes: int


def joint_runs(source_block_ids: Sequence[int], target_block_ids: Sequence[int]) -> list[Run]:
    """The two lists, which pair up, as runs."""
    runs: list[Run] = []
    first = 0
    for index in range(1, len(source_block_ids) + 1):
        if (
            index == len(source_block_ids)
            or source_block_ids[index] != source_block_ids[index - 1] + 1
            or target_block_ids[index] != target_block_ids[index - 1] + 1
        ):
            runs.append(Run(source_block_ids[first], target_block_ids[first], index - first))
            first = index
    return runs


def check_block_ids(source_block_ids: Sequence[int], target_block_ids: Sequence[int], target_blocks: int) -> None:
    """Raises `KvTransferRefused` for lists that do not pair up or that would write outside or twice."""
    if not source_block_ids:
        raise KvTransferRefused("no block is named; name at least one")
    if len(source_block_ids) != len(target_block_ids):
        raise KvTransferRefused(
            f"{len(source_block_ids)} source blocks and {len(target_block_ids)} target blocks do not pair up"
        )
    if min(source_block_ids) < 0 or min(target_block_ids) < 0 or max(target_block_ids) >= target_blocks:
        raise KvTransferRefused(f"block ids are from 0 on and below {target_blocks} at the target")
    if len(set(target_block_ids)) != len(target_block_ids):
        raise KvTransferRefused("a target block is named twice; each can be written only once")


class Packing(msgspec.Struct, frozen=True):
    """How blocks are packed into messages; the fields are those of the settings."""

    message_bytes: int
    gathered_bytes: int
    direct_bytes: int


def plan_messages(run_blocks: Sequence[int], region_block_bytes: Sequence[int], packing: Packing) -> Iterator[Message]:
    """The messages of runs that have so many blocks each, region by region.

    A run that is at least `direct_bytes` long in a region is cut into messages of its own, so that it can travel
    without a copy. Shorter ones are packed together. No message carries part of a block's bytes in a region, so
    none of these must be larger than `message_bytes`.
    """
    packed: list[Piece] = []
    packed_bytes = 0
    for region, block_bytes in enumerate(region_block_bytes):
        for run, blocks in enumerate(run_blocks):
            nbytes = blocks * block_bytes
            if nbytes >= packing.direct_bytes:
                yield from _cut(region, run, blocks, block_bytes, packing.message_bytes)
                continue
            if packed_bytes + nbytes > packing.gathered_bytes:
                yield Message(tuple(packed), packed_bytes)
                packed, packed_bytes = [], 0
            packed.append(Piece(region, run, 0, blocks))
            packed_bytes += nbytes
    if packed:
        yield Message(tuple(packed), packed_bytes)


def _cut(region: int, run: int, run_blocks: int, block_bytes: int, message_bytes: int) -> Iterator[Message]:
    step = message_bytes // block_bytes
    for first_block in range(0, run_blocks, step):
        blocks = min(step, run_blocks - first_block)
        yield Message((Piece(region, run, first_block, blocks),), blocks * block_bytes)


class Extent(NamedTuple):
    """Blocks of one region that are consecutive on one side."""

    region: int
    first_block: int
    blocks: int


def extents(message: Message, run_starts: Sequence[int]) -> list[Extent]:
    """Where a message's bytes lie on the side where the runs begin at these blocks."""
    found: list[Extent] = []
    for piece in message.pieces:
        first = run_starts[piece.run] + piece.first_block
        last = found[-1] if found else None
        if last is not None and last.region == piece.region and last.first_block + last.blocks == first:
            found[-1] = Extent(last.region, last.first_block, last.blocks + piece.blocks)
        else:
            found.append(Extent(piece.region, first, piece.blocks))
    return found
