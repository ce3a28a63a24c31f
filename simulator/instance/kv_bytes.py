"""The bytes that stand for the KV of a block.

As with a real KV cache, what a slot holds depends on its own token and on every token before it, so a block that
was swapped with another, shifted, torn or taken from another request shows in its bytes.
"""

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from simulator.instance.splitmix import splitmix_words


def kv_block_bytes(token_ids: NDArray[np.uint32], parent_hash: int, block_tokens: int, block_bytes: int) -> bytes:
    """Bytes of a block whose first len(token_ids) slots are filled; the slots after them are zero.

    `parent_hash` is the hash of the block before it in the request's chain.
    """
    view = memoryview(token_ids.astype(np.uint32).tobytes())
    keys = np.array(
        [xxh3_64_intdigest(view[: 4 * (slot + 1)], parent_hash) for slot in range(len(token_ids))],
        dtype=np.uint64,
    )
    slot_bytes = block_bytes // block_tokens
    indices = np.arange(-(-slot_bytes // 8), dtype=np.uint64)
    slots = splitmix_words(keys[:, None], indices[None, :]).view(np.uint8)[:, :slot_bytes]
    return slots.tobytes().ljust(block_bytes, b"\0")
