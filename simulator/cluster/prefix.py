"""Block hashes for the prompts of a trace, which names shared blocks but has no tokens."""

import numpy as np

from simulator.instance.splitmix import splitmix_words
from simulator.traces.request import TraceRequest


def prompt_block_hashes(request: TraceRequest, block_tokens: int) -> tuple[int, ...]:
    """Hashes of the prompt's full blocks of `block_tokens`, as far as the trace names their content.

    Equal hashes mean that all names up to the block's last token are equal. Which tokens a live replay sends
    follows from the same names (`simulator.traces.prompt`), so both worlds share the same blocks.
    """
    named_tokens = min(request.input_tokens, len(request.prefix_block_ids) * request.block_tokens)
    blocks = named_tokens // block_tokens
    if not blocks:
        return ()
    names = np.asarray(request.prefix_block_ids, dtype=np.int64).view(np.uint64)
    # A sum over words that depend on name and position: a chain that numpy computes at once.
    chain = np.cumsum(splitmix_words(names, np.arange(len(names), dtype=np.uint64)), dtype=np.uint64)
    last_tokens = np.arange(1, blocks + 1, dtype=np.int64) * block_tokens - 1
    at, offsets = np.divmod(last_tokens, request.block_tokens)
    hashes: list[int] = splitmix_words(chain[at], offsets.astype(np.uint64)).tolist()
    return tuple(hashes)
