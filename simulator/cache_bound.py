"""The fluid bound with caches of finite size: a rate that no schedule can exceed with so much memory for KV.

The fluid bound takes one infinite prefix cache for granted. Here the cache holds `cache_blocks` blocks: those of all
instances together, and those of their hosts' memory where that keeps KV. Assumed in the schedule's favour are, beside
what `fluid_bound` assumes,

- one cache: every instance finds in it what any has computed, bringing KV takes no time, and no block is there twice;
- all of it is cache: requests that run keep their own KV somewhere else;
- no chains: a cached block is a hit even where one before it in its prompt is not, and is then not computed;
- foresight: what is kept is chosen in knowledge of the whole trace.

What is left is a paging problem: all blocks of a prompt are asked for at once, and between two prompts at most
`cache_blocks` blocks are kept. Each block that a prompt shares with an earlier one can be a hit if it was kept ever
since its last use; of these intervals, at most `cache_blocks` may overlap at any time. As all blocks are alike, most
intervals are kept by dropping whatever is used again latest whenever there are too many (Belady; Carlisle and Lloyd
show the same for intervals on k machines), so no schedule that takes prompts in the order of the trace misses less. One
that takes them in another order may: the bound is one for serving in the order of arrival, which no policy here departs
from by more than its queues are long.

A miss costs a block's tokens, which attend to all that come before them in their prompt; which blocks miss is the
schedule's choice, so as many of the shallowest ones are taken as there are misses.
"""

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from simulator.cluster.config import ClusterConfig
from simulator.cluster.prefix import prompt_block_hashes
from simulator.cost.model import CostModel
from simulator.fluid_bound import FluidBound, FluidWork, fluid_bound, fluid_work
from simulator.traces.request import TraceRequest

Integers = NDArray[np.int64]


def cache_bound(requests: Sequence[TraceRequest], cluster: ClusterConfig, cost: CostModel) -> FluidBound:
    """The bound for the memory that the cluster's instances, and its hosts where they keep KV, have. Raises
    `ConfigurationError` without a request."""
    work = finite_cache_work(requests, cluster.instance.block_tokens, cache_blocks(cluster))
    return fluid_bound(requests, cluster, cost, work)


def cache_blocks(cluster: ClusterConfig) -> int:
    """KV blocks of all instances and hosts."""
    blocks = sum(cluster.spec(number).config.kv_blocks for number in range(cluster.instances))
    return blocks + int(blocks * cluster.kv_reuse.host_factor)


def finite_cache_work(requests: Sequence[TraceRequest], block_tokens: int, cache_blocks: int) -> FluidWork:
    """The least work of requests in their order with a cache of so many blocks."""
    work = fluid_work(requests, block_tokens)
    prompts, depths, nexts, is_repeat = _accesses(requests, block_tokens)
    misses = int(is_repeat.sum()) - most_hits(prompts, nexts, cache_blocks)
    shallowest = np.partition(depths[is_repeat], misses - 1)[:misses] if misses else depths[:0]
    attended = int(shallowest.sum()) * block_tokens**2 + misses * block_tokens * (block_tokens + 1) // 2
    return replace(
        work,
        prompt_tokens=work.prompt_tokens + misses * block_tokens,
        attended_tokens=work.attended_tokens + attended,
    )


def most_hits(prompts: Integers, nexts: Integers, cache_blocks: int) -> int:
    """How many block accesses can be hits at most. Each access is of a prompt (ascending), and its block is asked for
    again by the prompt `nexts` (-1: never)."""
    again = nexts >= 0
    pairs, counts = np.unique(np.stack((prompts[again], nexts[again]), axis=1), axis=0, return_counts=True)
    kept: dict[int, int] = {}
    latest: list[int] = []
    """Prompts that something is kept for, the last one first, negated."""
    hits = blocks = 0
    reached = -1
    for (prompt, following), count in zip(pairs.tolist(), counts.tolist(), strict=True):
        if prompt != reached:
            blocks = _drop(kept, latest, blocks, cache_blocks)
            for due in range(reached + 1, prompt + 1):
                found = kept.pop(due, 0)
                hits += found
                blocks -= found
            reached = prompt
        if following not in kept:
            heappush(latest, -following)
        kept[following] = kept.get(following, 0) + count
        blocks += count
    _drop(kept, latest, blocks, cache_blocks)
    return hits + sum(kept.values())


def _drop(kept: dict[int, int], latest: list[int], blocks: int, cache_blocks: int) -> int:
    """Drop what is used again latest until the rest fits. Returns how many blocks are left."""
    while blocks > cache_blocks:
        following = -latest[0]
        here = kept.get(following, 0)
        dropped = min(here, blocks - cache_blocks)
        blocks -= dropped
        if dropped == here:
            kept.pop(following, None)
            heappop(latest)
        else:
            kept[following] = here - dropped
    return blocks


def _accesses(
    requests: Sequence[TraceRequest], block_tokens: int
) -> tuple[Integers, Integers, Integers, NDArray[np.bool_]]:
    """Every block that a prompt could find in a cache: its prompt, its place in it, the next prompt that asks for it
    (-1: none), and whether one has asked for it before."""
    chains = []
    for request in requests:
        # The last token is always computed, for its output, and with it its block.
        most = (request.input_tokens - 1) // block_tokens
        chains.append(np.array(prompt_block_hashes(request, block_tokens)[:most], np.uint64))
    lengths = np.array([len(chain) for chain in chains], np.int64)
    hashes = np.concatenate(chains) if chains else np.zeros(0, np.uint64)
    prompts = np.repeat(np.arange(len(chains)), lengths)
    depths = np.arange(len(hashes)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    order = np.argsort(hashes, kind="stable")
    is_same = hashes[order[1:]] == hashes[order[:-1]]
    nexts = np.full(len(hashes), -1, np.int64)
    nexts[order[:-1][is_same]] = prompts[order[1:][is_same]]
    is_repeat = np.zeros(len(hashes), np.bool_)
    is_repeat[order[1:][is_same]] = True
    return prompts, depths, nexts, is_repeat
