"""From the engine's block hashes to the mesh's. Pure.

vLLM names a cached block by a hash of its own and sends the block's tokens along when it is stored. The mesh's
hash follows from the tokens and from the mesh's hash of the block before.
"""

from collections.abc import Iterable

import msgspec

from controlplane.model.instance import KvBlocks
from controlplane.model.prefix_hash import block_hashes, root_hash

EngineHash = int | bytes
_ENGINE_MEDIUM = "GPU"
"""What vLLM calls the memory of its own KV cache, on a CPU too; other media are offloading tiers."""


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True):
    """Blocks became usable for other requests; fields of `vllm.distributed.kv_events.BlockStored`."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """Blocks were evicted, one mention for each physical block."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    """vLLM's event of a reset prefix cache."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventBatch(msgspec.Struct, array_like=True, frozen=True):
    """One message of vLLM's event stream."""

    ts: float
    events: list[KvEvent]


class _Entry(msgspec.Struct):
    mesh_hash: int
    copies: int


class BlockMap:
    """What the engine's prefix cache holds, as far as its events told.

    vLLM keeps equal blocks side by side when requests computed them at the same time, and tells of each
    physical block; a hash is gone when its last copy is. At most as large as the engine's cache.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._entries: dict[EngineHash, _Entry] = {}
        self._cached: set[int] = set()
        self.unmapped_blocks_total = 0
        """Stored blocks that have no hash in the mesh: of a LoRA or multimodal request, or behind a block that
        is unknown since a gap in the events."""

    def apply(self, events: Iterable[KvEvent]) -> KvBlocks | None:
        """Take events in, in order. Returns what changed in all, None if nothing did."""
        changed: dict[int, bool] = {}
        cleared = False
        for event in events:
            match event:
                case BlockStored():
                    self._store(event, changed)
                case BlockRemoved():
                    self._remove(event, changed)
                case AllBlocksCleared():
                    self.clear()
                    cleared, changed = True, {}
        return _change(changed, cleared)

    def clear(self) -> None:
        """Forget all blocks: the engine has reset its prefix cache."""
        self._entries.clear()
        self._cached.clear()

    def cached_tokens(self, token_ids: tuple[int, ...], cache_salt: str = "") -> int:
        """How many leading tokens of a prompt the engine would find in its cache now. It always computes the
        last token, with the whole block that it is in."""
        usable = token_ids[: (len(token_ids) - 1) // self._block_tokens * self._block_tokens]
        if not self._cached or not usable:
            return 0
        blocks = 0
        for mesh_hash in block_hashes(usable, self._block_tokens, root_hash(cache_salt)):
            if mesh_hash not in self._cached:
                break
            blocks += 1
        return blocks * self._block_tokens

    def _store(self, event: BlockStored, changed: dict[int, bool]) -> None:
        if event.medium not in (None, _ENGINE_MEDIUM) or event.group_idx not in (None, 0):
            return
        parent = self._parent(event)
        if parent is None:
            self.unmapped_blocks_total += len(event.block_hashes)
            return
        mesh_hashes = block_hashes(event.token_ids, self._block_tokens, parent)
        for engine_hash, mesh_hash in zip(event.block_hashes, mesh_hashes, strict=True):
            entry = self._entries.get(engine_hash)
            if entry is not None:
                entry.copies += 1
                continue
            self._entries[engine_hash] = _Entry(mesh_hash, copies=1)
            self._cached.add(mesh_hash)
            _note(changed, mesh_hash, is_stored=True)

    def _parent(self, event: BlockStored) -> int | None:
        keys = event.extra_keys or ()
        salt = _salt_of(keys[0]) if keys and event.parent_block_hash is None else ""
        is_plain_text = event.lora_name is None and not any(keys[1:] if salt else keys)
        # Sliding windows leave blocks out and hybrid models store partial ones: neither can be named by tokens.
        is_whole = len(event.token_ids) == len(event.block_hashes) * self._block_tokens
        if not is_plain_text or not is_whole:
            return None
        if event.parent_block_hash is None:
            return root_hash(salt)
        entry = self._entries.get(event.parent_block_hash)
        return None if entry is None else entry.mesh_hash

    def _remove(self, event: BlockRemoved, changed: dict[int, bool]) -> None:
        if event.medium not in (None, _ENGINE_MEDIUM) or event.group_idx not in (None, 0):
            return
        for engine_hash in event.block_hashes:
            entry = self._entries.get(engine_hash)
            if entry is None:
                continue
            entry.copies -= 1
            if entry.copies == 0:
                del self._entries[engine_hash]
                self._cached.discard(entry.mesh_hash)
                _note(changed, entry.mesh_hash, is_stored=False)


def _salt_of(keys: object) -> str:
    """The cache salt among a first block's extra keys: its only one, if it is of neither LoRA nor another medium. What
    else may be in it is a pair or bytes."""
    return keys[0] if isinstance(keys, list | tuple) and len(keys) == 1 and isinstance(keys[0], str) else ""


def _note(changed: dict[int, bool], mesh_hash: int, *, is_stored: bool) -> None:
    # A block that came and went within one batch leaves no trace.
    if changed.get(mesh_hash) == (not is_stored):
        del changed[mesh_hash]
    else:
        changed[mesh_hash] = is_stored


def _change(changed: dict[int, bool], cleared: bool) -> KvBlocks | None:
    if not changed and not cleared:
        return None
    return KvBlocks(
        stored=tuple(mesh_hash for mesh_hash, is_stored in changed.items() if is_stored),
        removed=tuple(mesh_hash for mesh_hash, is_stored in changed.items() if not is_stored),
        cleared=cleared,
    )
