"""Which part of which rank's KV goes where, between instances of any shape. Pure.

An instance whose model is spread over ranks has its KV spread too: a rank has the layers of its pipeline stage, and of
each the heads of its share of the tensors. Where there are more ranks than heads, several have the same ones. A rank
that pulls takes each layer and head of its own from one rank that has it, whatever the shapes of the two.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine_worker.kv.layout import KvLayout, Region
from mesh.errors import KvTransferRefused


class Part(NamedTuple):
    """Some heads of one region, in every block."""

    region: int
    first_head: int
    """Counted from the region's own first."""
    heads: int


class Source(NamedTuple):
    """What one rank of the source gives: its `theirs[i]` goes to `ours[i]`."""

    rank: int
    theirs: tuple[Part, ...]
    ours: tuple[Part, ...]


def plan_sources(target: KvLayout, sources: Sequence[KvLayout]) -> list[Source]:
    """Every layer and head of the target, once. `sources` are all ranks of an instance, in their order.

    Raises `KvTransferRefused` where they lack something, or have it in other pieces.
    """
    if not all(layout.regions for layout in (target, *sources)):
        return [_only(sources)]
    theirs: dict[str, list[tuple[int, int, Region]]] = {}
    for rank, source in enumerate(sources):
        for number, region in enumerate(source.regions):
            theirs.setdefault(region.name, []).append((rank, number, region))
    pairs: dict[int, list[tuple[Part, Part]]] = {}
    for number, region in enumerate(target.regions):
        candidates = theirs.get(region.name, [])
        head, end = region.first_head, region.first_head + region.heads
        while head < end:
            rank, theirs_number, there = _holder(region, head, candidates, target.rank)
            until = min(end, there.first_head + there.heads)
            pairs.setdefault(rank, []).append(
                (
                    Part(theirs_number, head - there.first_head, until - head),
                    Part(number, head - region.first_head, until - head),
                )
            )
            head = until
    return [
        Source(rank, tuple(there for there, _ in pairs[rank]), tuple(here for _, here in pairs[rank]))
        for rank in sorted(pairs)
    ]


def whole(layout: KvLayout) -> tuple[Part, ...]:
    """All of a layout that names its regions."""
    return tuple(Part(number, 0, region.heads) for number, region in enumerate(layout.regions))


def part_refusal(layout: KvLayout, parts: Sequence[Part]) -> str:
    """Why a peer cannot have these parts; empty if it can."""
    for part in parts:
        if not 0 <= part.region < len(layout.regions):
            return f"region {part.region} is asked for, and {len(layout.regions)} are named here"
        heads = layout.regions[part.region].heads
        if not (part.first_head >= 0 and 0 < part.heads <= heads - part.first_head):
            return f"heads from {part.first_head} on, {part.heads} of them, are asked for, and {heads} are here"
    return ""


def part_block_bytes(layout: KvLayout, parts: Sequence[Part]) -> tuple[int, ...]:
    """Bytes of a block in each of these parts."""
    return tuple(
        part.heads * layout.regions[part.region].runs * layout.regions[part.region].head_bytes for part in parts
    )


def _only(sources: Sequence[KvLayout]) -> Source:
    if len(sources) != 1:
        raise KvTransferRefused(f"the peer has {len(sources)} ranks, and not all say which heads they have")
    return Source(0, (), ())


def _holder(
    region: Region, head: int, candidates: Sequence[tuple[int, int, Region]], turn: int
) -> tuple[int, int, Region]:
    """Who gives this head. Of several that have it, not all targets take the same."""
    having = [each for each in candidates if each[2].first_head <= head < each[2].first_head + each[2].heads]
    if not having:
        raise KvTransferRefused(f"no rank of the peer has head {head} of {region.name}: is it the same model?")
    rank, number, there = having[turn % len(having)]
    if (there.runs, there.head_bytes) != (region.runs, region.head_bytes):
        raise KvTransferRefused(
            f"a block of {region.name} has its heads in {region.runs} pieces of {region.head_bytes} bytes here and in "
            f"{there.runs} of {there.head_bytes} at rank {rank} of the peer: give both one layout of the KV cache"
        )
    return rank, number, there
