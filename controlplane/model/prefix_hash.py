"""The chain of block hashes by which the whole mesh names KV blocks.

Each hash covers a block's tokens and, through its predecessor's hash as the seed, all tokens before it: equal
hashes mean equal prefixes (64-bit xxh3; a collision costs a misplaced request, never a wrong token, because
engines verify with hashes of their own). A block with tokens of an image or the like covers the hash of its content
too, and where it begins, as vLLM's own hashes do.
"""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

from controlplane.model.media import MediaSpan, spans_within

ROOT_HASH = 0


def root_hash(cache_salt: str, adapter_digest: str = "") -> int:
    """The `parent_hash` of a prompt's first block: prompts of different salts, or under different LoRA adapters, share
    no block."""
    if not cache_salt and not adapter_digest:
        return ROOT_HASH
    # As the seed, so that no salt that a client makes up is the digest of an adapter.
    seed = xxh3_64_intdigest(adapter_digest.encode()) if adapter_digest else 0
    return xxh3_64_intdigest(cache_salt.encode(), seed)


MediaKey = tuple[str, int]
"""Of a medium with tokens in a block: its hash, and the index of its first token, counted from the block's first."""


def media_keys(spans: Sequence[MediaSpan], start: int, stop: int) -> list[MediaKey]:
    """Of the block of the tokens start .. stop - 1."""
    return [(span.media_hash, span.offset - start) for span in spans_within(spans, start, stop)]


def block_hash(tokens: bytes | memoryview, parent_hash: int, media: Sequence[MediaKey] = ()) -> int:
    """Of one block; `tokens` are its ids in 32 bits each."""
    if not media:
        return xxh3_64_intdigest(tokens, parent_hash)
    told = "".join(f"/{media_hash}@{offset}" for media_hash, offset in media)
    return xxh3_64_intdigest(bytes(tokens) + told.encode(), parent_hash)


def block_hashes(
    token_ids: Sequence[int],
    block_tokens: int,
    parent_hash: int = ROOT_HASH,
    spans: Sequence[MediaSpan] = (),
    first_token: int = 0,
) -> list[int]:
    """Hashes of the full blocks of `token_ids`, in order; a trailing partial block has none.

    `parent_hash` is the hash of the block before the first one, `root_hash` at the start of a prompt. `first_token` is
    the index in the prompt of the first of `token_ids`, as `spans` count them.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, got {block_tokens}")
    view = memoryview(np.asarray(token_ids, dtype=np.uint32).tobytes())
    width = 4 * block_tokens
    hashes: list[int] = []
    for start in range(0, len(view) - width + 1, width):
        index = first_token + start // 4
        keys = media_keys(spans, index, index + block_tokens) if spans else ()
        parent_hash = block_hash(view[start : start + width], parent_hash, keys)
        hashes.append(parent_hash)
    return hashes
