"""Names of KV blocks that no two contents share.

The mesh's own hashes have 64 bits and say where to look; a block that is loaded by its name must be the one that was
meant. Each name covers the block's tokens, the media in them, and by its predecessor's name all that comes before, with
the cache salt and the LoRA adapter at its root; which model and which layout is said by the store that it is in. On
vLLM, its own hashes are the names (SHA-256 over the same).
"""

import json
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from controlplane.model.media import MediaSpan
from controlplane.model.prefix_hash import media_keys
from engine_worker.host_tier.index import NAME_BYTES


def root_name(cache_salt: str, adapter_digest: str) -> bytes:
    """What stands before a prompt's first block."""
    return blake2b(json.dumps([cache_salt, adapter_digest]).encode(), digest_size=NAME_BYTES).digest()


def block_names(
    token_ids: Sequence[int] | NDArray[np.uint32],
    block_tokens: int,
    parent: bytes,
    spans: Sequence[MediaSpan] = (),
    first_token: int = 0,
) -> list[bytes]:
    """Of the full blocks of `token_ids`, in order. `parent` is the name of the block before, or the root's;
    `first_token` the index in the prompt of the first of `token_ids`."""
    view = memoryview(np.asarray(token_ids, dtype="<u4").tobytes())
    width = 4 * block_tokens
    names: list[bytes] = []
    for start in range(0, len(view) - width + 1, width):
        index = first_token + start // 4
        # Tokens have one length and come first, so that none is taken for a part of a key.
        content = parent + bytes(view[start : start + width])
        if spans and (keys := media_keys(spans, index, index + block_tokens)):
            content += json.dumps(keys).encode()
        parent = blake2b(content, digest_size=NAME_BYTES).digest()
        names.append(parent)
    return names
