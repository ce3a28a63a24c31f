"""What two agents must have in common before bytes of one make sense to the other."""

import msgspec


class Region(msgspec.Struct, frozen=True):
    """A region whose layer and heads are known, so that a part of it can move: one layer's keys and values as one rank
    has them, or its keys or values alone where they lie apart."""

    name: str
    """The same in every instance of the model."""
    first_head: int
    """Of those that this rank has, counted over the whole model's KV heads."""
    heads: int
    runs: int
    """Pieces of a block in which each head's bytes lie: 1 where they follow each other, as many as a block has tokens
    where the heads of a token do. In each piece the heads come in order."""
    head_bytes: int
    """Of one head in one piece."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.runs * self.heads * self.head_bytes


class KvLayout(msgspec.Struct, frozen=True):
    """How KV lies in memory: block b is, for each region, the b-th run of `region_block_bytes[region]` bytes."""

    model: str
    dtype: str
    block_tokens: int
    region_block_bytes: tuple[int, ...]
    """One region per layer, or two where keys and values lie apart, or a single one where a block is in one piece."""
    isa: str = ""
    """Names the order of the elements inside a block where that depends on the processor (vLLM's CPU attention)."""
    regions: tuple[Region, ...] = ()
    """What the regions are. Empty where the engine cannot tell: then only equal layouts exchange blocks."""
    rank: int = 0
    """Of the instance's ranks, over which its KV is spread."""
    ranks: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all regions."""
        return sum(self.region_block_bytes)


def layout_mismatch(ours: KvLayout, theirs: KvLayout) -> str:
    """Why blocks cannot move between the two; empty if they can. Where both name their regions, which of them the two
    have in common is another matter (see `regions`)."""
    for name in ("model", "dtype", "block_tokens", "isa"):
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if our_value != their_value:
            return f"{name} is {our_value!r} here and {their_value!r} there"
    if ours.regions and theirs.regions:
        return ""
    if len(ours.region_block_bytes) != len(theirs.region_block_bytes):
        return f"{len(ours.region_block_bytes)} regions (layers) here and {len(theirs.region_block_bytes)} there"
    if ours.region_block_bytes != theirs.region_block_bytes:
        return f"a block has {ours.block_bytes} bytes here and {theirs.block_bytes} there, or other ones per layer"
    return ""
