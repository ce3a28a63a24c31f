"""A request of which only the lengths are known, as traces give them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CountedRequest:
    """What the instance model needs to know of a request when nobody reads its tokens."""

    request_id: str
    prompt_tokens: int
    output_tokens: int
    """All that it generates, the ones emitted before a migration or recovery included."""
    emitted_tokens: int = 0
    block_hashes: tuple[int, ...] = ()
    """Hashes of its blocks from the start of the prompt on; equal hashes mean equal prefixes. Blocks without
    one (generated ones, where the trace does not say how a later prompt goes on) are never shared."""
    priority: int = 0
    turn: int = 0
    """Among those of its priority, as an `EngineRequest` has it."""
