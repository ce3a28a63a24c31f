"""From the engine's block hashes to the mesh's. Pure.

vLLM names a cached block by a hash of its own and sends the block's tokens along when it is stored. The mesh's
hash follows from the tokens and from the mesh's hash of the block before.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from controlplane.model.instance import KvBlocks
from controlplane.model.media import MediaSpan
from controlplane.model.prefix_hash import MediaKey, block_hash, block_hashes, root_hash

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
    extra_keys: list[list[object] | None] | None = None
    """Of each block: what its hash covers besides tokens."""
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
        """Stored blocks that have no hash in the mesh: behind a block that is unknown since a gap in the events, or
        those of a model whose blocks are not named by their tokens."""

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

    def cached_tokens(
        self,
        token_ids: tuple[int, ...],
        cache_salt: str = "",
        spans: Sequence[MediaSpan] = (),
        adapter_digest: str = "",
    ) -> int:
        """How many leading tokens of a prompt the engine would find in its cache now. It always computes the
        last token, with the whole block that it is in."""
        usable = token_ids[: (len(token_ids) - 1) // self._block_tokens * self._block_tokens]
        if not self._cached or not usable:
            return 0
        blocks = 0
        for mesh_hash in block_hashes(usable, self._block_tokens, root_hash(cache_salt, adapter_digest), spans):
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
        mesh_hashes = self._mesh_hashes(event, parent)
        for engine_hash, mesh_hash in zip(event.block_hashes, mesh_hashes, strict=True):
            entry = self._entries.get(engine_hash)
            if entry is not None:
                entry.copies += 1
                continue
            self._entries[engine_hash] = _Entry(mesh_hash, copies=1)
            self._cached.add(mesh_hash)
            _note(changed, mesh_hash, is_stored=True)

    def _mesh_hashes(self, event: BlockStored, parent: int) -> list[int]:
        if not any(event.extra_keys or ()):
            return block_hashes(event.token_ids, self._block_tokens, parent)
        hashes: list[int] = []
        for index, keys in enumerate(event.extra_keys or ()):
            tokens = event.token_ids[index * self._block_tokens : (index + 1) * self._block_tokens]
            media = [key for key in map(_media_key, keys or ()) if key is not None]
            parent = block_hash(np.asarray(tokens, dtype=np.uint32).tobytes(), parent, media)
            hashes.append(parent)
        return hashes

    def _parent(self, event: BlockStored) -> int | None:
        keys = _keys_of(event)
        if keys is None:
            return None
        salt = _salt_of(keys[0]) if keys and event.parent_block_hash is None else ""
        others = [key for block in keys for key in block or () if _media_key(key) is None and key != salt]
        # Sliding windows leave blocks out and hybrid models store partial ones: neither can be named by tokens.
        is_whole = len(event.token_ids) == len(event.block_hashes) * self._block_tokens
        if others or not is_whole or len(keys) not in (0, len(event.block_hashes)):
            return None
        if event.parent_block_hash is None:
            return root_hash(salt, event.lora_name or "")
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


def _salt_of(keys: Sequence[object] | None) -> str:
    """The cache salt among a first block's extra keys: the only one that is a text, where no LoRA adapter is."""
    texts = [key for key in keys or () if isinstance(key, str)]
    return texts[0] if len(texts) == 1 else ""


def _media_key(key: object) -> MediaKey | None:
    """Of an extra key that names an image or the like: its identifier, which is the mesh's hash of it, and where it
    begins. None for any other."""
    if isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
        return key[0], key[1]
    return None


def _keys_of(event: BlockStored) -> Sequence[Sequence[object] | None] | None:
    """The extra keys of each block, without that of a LoRA adapter, which comes first in each. vLLM is told its
    checksum for its name (see `adapters`). None where they are not as expected."""
    keys = event.extra_keys or ()
    if event.lora_name is None:
        return keys
    without = []
    for each in keys:
        if not isinstance(each, list | tuple) or not each or each[0] != event.lora_name:
            return None
        without.append(each[1:])
    return without if len(without) == len(event.block_hashes) else None


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
