"""What two agents must have in common before bytes of one make sense to the other."""

import msgspec


class KvLayout(msgspec.Struct, frozen=True):
    """How KV lies in memory: block b is, for each region, the b-th run of `region_block_bytes[region]` bytes."""

    model: str
    dtype: str
    block_tokens: int
    region_block_bytes: tuple[int, ...]
    """One region per layer, or two where keys and values lie apart, or a single one where a block is in one piece."""
    isa: str = ""
    """Names the order of the elements inside a block where that depends on the processor (vLLM's CPU attention)."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all regions."""
        return sum(self.region_block_bytes)


def layout_mismatch(ours: KvLayout, theirs: KvLayout) -> str:
    """Why blocks cannot move between the two; empty if they can."""
    for name in ("model", "dtype", "block_tokens", "isa"):
        our_value, their_value = getattr(ours, name), getattr(theirs, name)
        if our_value != their_value:
            return f"{name} is {our_value!r} here and {their_value!r} there"
    if len(ours.region_block_bytes) != len(theirs.region_block_bytes):
        return f"{len(ours.region_block_bytes)} regions (layers) here and {len(theirs.region_block_bytes)} there"
    if ours.region_block_bytes != theirs.region_block_bytes:
        return f"a block has {ours.block_bytes} bytes here and {theirs.block_bytes} there, or other ones per layer"
    return ""
