"""The chain of block hashes by which the whole mesh names KV blocks.

Each hash covers a block's tokens and, through its predecessor's hash as the seed, all tokens before it: equal
hashes mean equal prefixes (64-bit xxh3; a collision costs a misplaced request, never a wrong token, because
engines verify with hashes of their own).
"""

from collections.abc import Sequence

import numpy as np
from xxhash import xxh3_64_intdigest

ROOT_HASH = 0


def root_hash(cache_salt: str) -> int:
    """The `parent_hash` of a prompt's first block: prompts of different salts share no block."""
    return xxh3_64_intdigest(cache_salt.encode()) if cache_salt else ROOT_HASH


def block_hashes(token_ids: Sequence[int], block_tokens: int, parent_hash: int = ROOT_HASH) -> list[int]:
    """Hashes of the full blocks of `token_ids`, in order; a trailing partial block has none.

    `parent_hash` is the hash of the block before the first one, `root_hash` at the start of a prompt.
    """
    if block_tokens <= 0:
        raise ValueError(f"block_tokens must be positive, got {block_tokens}")
    view = memoryview(np.asarray(token_ids, dtype=np.uint32).tobytes())
    width = 4 * block_tokens
    hashes: list[int] = []
    for start in range(0, len(view) - width + 1, width):
        parent_hash = xxh3_64_intdigest(view[start : start + width], parent_hash)
        hashes.append(parent_hash)
    return hashes
