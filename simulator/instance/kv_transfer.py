"""The door through which KV blocks leave an instance and enter another.

No protocol is spoken here: whoever moves a request reads its blocks, admits it elsewhere and writes them there.
"""

from dataclasses import dataclass

from mesh.errors import IllegalTransition, KvBlockCorrupt
from simulator.instance.kv_cache import KvCache
from simulator.instance.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KvExport:
    """The blocks that hold a running request's KV."""

    block_ids: tuple[int, ...]
    """The request's blocks in the order of its tokens."""
    computed_tokens: int
    """Tokens whose KV is there."""
    tokens: int
    """Prompt and generated tokens."""


@dataclass(frozen=True, slots=True)
class KvImport:
    """Which blocks a request still needs from its former instance."""

    block_ids: tuple[int, ...]
    """Blocks to be written here, in the order of its tokens."""
    first_block: int
    """How many leading blocks the local prefix cache had."""
    computed_tokens: int
    """Tokens whose KV is there once all of `block_ids` are written."""


class KvImports:
    """Blocks that wait to be written, and the check of what is written into them."""

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._awaited: dict[int, tuple[Sequence, int]] = {}

    def expect(self, sequence: Sequence, first_block: int) -> KvImport:
        """Await the blocks of an importing request from `first_block` to the end of its computed tokens."""
        stop = self._kv.blocks_for(sequence.computed_tokens)
        blocks = tuple(sequence.blocks[first_block:stop])
        if sequence.text is not None:
            for index, block in enumerate(blocks, start=first_block):
                self._awaited[block] = (sequence, index)
        return KvImport(blocks, first_block, sequence.computed_tokens)

    def write(self, block: int, content: bytes) -> None:
        """Raises `KvBlockCorrupt` where the content is not what the request's tokens say; the block is then
        still awaited. `IllegalTransition` where nobody awaits the block."""
        awaited = self._awaited.get(block)
        if awaited is None:
            raise IllegalTransition(f"block {block} awaits no transfer: written twice, or of no importing request")
        sequence, index = awaited
        if content != self._kv.expected_bytes(sequence, index, sequence.computed_tokens):
            raise KvBlockCorrupt(
                f"block {block}, number {index} of {sequence.story()}, arrived with {len(content)} bytes that do "
                "not belong to its tokens; fetch it again or give the import up"
            )
        del self._awaited[block]

    def awaits(self, block: int) -> bool:
        """Whether a block is still to be written."""
        return block in self._awaited

    def missing(self, sequence: Sequence) -> list[int]:
        """Blocks of a request that were not written yet."""
        return [block for block in sequence.blocks if block in self._awaited]

    def forget(self, sequence: Sequence) -> None:
        """Give up an import: its missing blocks are not awaited any more."""
        for block in self.missing(sequence):
            del self._awaited[block]
