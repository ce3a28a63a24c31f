"""Transformations of a trace: cut it, scale its rate or lengths, spread its arrivals, share prefixes.

Each takes and gives requests lazily, in order of arrival.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, takewhile

import numpy as np

from simulator.traces.block_runs import BlockRuns
from simulator.traces.request import TraceRequest

SHARED_BLOCK_TOKENS = 16
SHARED_FIRST_ID = 1 << 50
"""Far from the ids of any trace."""
SHARED_ID_STRIDE = 1 << 30
COPY_ID_STRIDE = 1 << 52


def clip(requests: Iterable[TraceRequest], start_s: float, end_s: float) -> Iterator[TraceRequest]:
    """Arrivals in [start_s, end_s), counted anew from `start_s`."""
    for request in takewhile(lambda request: request.arrival_s < end_s, requests):
        if request.arrival_s >= start_s:
            yield replace(request, arrival_s=request.arrival_s - start_s) if start_s else request


def scale_rate(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Arrivals `factor` times as dense."""
    if factor == 1.0:
        yield from requests
        return
    for request in requests:
        yield replace(request, arrival_s=request.arrival_s / factor)


def scale_lengths(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """Prompts, answers and prefix blocks `factor` times as long, of at least one token each.

    Lengths of prompts stay exact; the size of a block is rounded, so that the shared part of a prompt may be
    off by up to half a token a block.
    """
    if factor == 1.0:
        yield from requests
        return
    for request in requests:
        yield replace(
            request,
            input_tokens=max(1, round(request.input_tokens * factor)),
            output_tokens=max(1, round(request.output_tokens * factor)),
            block_tokens=max(1, round(request.block_tokens * factor)) if request.block_tokens else 0,
        )


def spread_arrivals(
    requests: Iterable[TraceRequest], grid_s: float, rng: np.random.Generator
) -> Iterator[TraceRequest]:
    """Arrivals that were rounded to a grid, uniformly at random within the `grid_s` that follow each point.

    A rounded trace shows bursts that never happened: all requests of 3 s at once in Mooncake's.
    """
    for slot, members in groupby(requests, lambda request: round(request.arrival_s / grid_s)):
        together = list(members)
        offsets_s = np.sort(rng.uniform(0.0, grid_s, len(together)))
        for request, offset_s in zip(together, offsets_s.tolist(), strict=True):
            yield replace(request, arrival_s=slot * grid_s + offset_s)


def share_prefixes(
    requests: Iterable[TraceRequest], share: float, groups: int, rng: np.random.Generator
) -> Iterator[TraceRequest]:
    """Requests without prefix blocks get one of `groups` common prefixes, `share` of their prompt long.

    Popularity falls as 1/rank (Zipf), as that of system prompts does. Requests with blocks pass unchanged.
    """
    weights = 1.0 / np.arange(1, groups + 1)
    weights /= weights.sum()
    for request in requests:
        blocks = int(request.input_tokens * share) // SHARED_BLOCK_TOKENS
        if request.prefix_block_ids or blocks == 0:
            yield request
            continue
        first_id = SHARED_FIRST_ID + int(rng.choice(groups, p=weights)) * SHARED_ID_STRIDE
        yield replace(
            request,
            prefix_block_ids=tuple(range(first_id, first_id + blocks)),
            block_tokens=SHARED_BLOCK_TOKENS,
        )


def superpose(requests: Iterable[TraceRequest], copies: int, rng: np.random.Generator) -> Iterator[TraceRequest]:
    """So many times the load, in the same time: copies of the trace, all but the first turned round by a random part
    of its length (what is moved beyond the end comes at the beginning).

    Unlike `scale_rate` this leaves bursts, and the time that the trace takes, as they are. Copies share no prefixes
    and no sessions. A request that waits for the one before it in its session waits in each copy.
    """
    whole = list(requests)
    if not whole or copies == 1:
        yield from whole
        return
    span_s = whole[-1].arrival_s
    offsets_s = [0.0, *rng.uniform(0.0, span_s, copies - 1).tolist()] if span_s else [0.0] * copies
    turned: list[TraceRequest] = []
    for copy, offset_s in enumerate(offsets_s):
        for request in whole:
            arrival_s = request.arrival_s + offset_s
            turned.append(
                replace(
                    request,
                    arrival_s=arrival_s - span_s if arrival_s > span_s else arrival_s,
                    prefix_block_ids=_renamed(request.prefix_block_ids, copy * COPY_ID_STRIDE),
                    session_id=f"{request.session_id}~{copy}" if request.session_id and copy else request.session_id,
                )
            )
    yield from sorted(turned, key=lambda request: request.arrival_s)


def _renamed(names: Sequence[int], offset: int) -> Sequence[int]:
    if not offset or not names:
        return names
    return names.shifted(offset) if isinstance(names, BlockRuns) else tuple(name + offset for name in names)


def fit_context(request: TraceRequest, max_tokens: int) -> TraceRequest:
    """`request` itself if a context of `max_tokens` holds it, otherwise shortened to just fit.

    Prompt and answer shrink in the same proportion, so that the request keeps its kind.
    """
    if max_tokens < 2:
        raise ValueError(f"a context holds at least a prompt token and an answer token, got {max_tokens}")
    if request.total_tokens <= max_tokens:
        return request
    input_tokens = request.input_tokens * max_tokens // request.total_tokens
    input_tokens = min(max(1, input_tokens), max_tokens - 1)
    return replace(request, input_tokens=input_tokens, output_tokens=max_tokens - input_tokens)
