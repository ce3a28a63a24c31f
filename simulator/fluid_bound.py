"""The fluid bound: a rate that no schedule can exceed with these costs and instances.

The work of a workload is taken as a fluid: P prompt tokens to compute and D tokens to decode. Assumed in the schedule's
favour are

- perfect batching: any step may be composed of any number of decodes and prompt tokens within the limits of a step
  and of memory, with no request ever waiting, and with the remainder of a step never wasted;
- perfect caching: one infinite prefix cache for all instances, so that each named block of the trace is computed once;
- equal lengths: every decode has the workload's mean context and every prompt token its mean number of tokens to
  attend to, which for a cost that is convex in the lengths (linear ones, rooflines) costs least of all;
- memory: a decoding request holds only the tokens that it shares with nobody, and half of its answer on average.

The least time in which instances can do this work is a linear program over kinds of steps (n decodes, p prompt
tokens): minimise sum x T(n, p) subject to sum x n >= D and sum x p >= P. Its optimum mixes at most two kinds, so all
pairs of a grid of kinds are tried. The bound is exact up to that grid; arrivals, SLOs and KV transfers are not in it,
so a real schedule stays below it even when it is perfect.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh.errors import ConfigurationError
from simulator.cluster.config import ClusterConfig
from simulator.cluster.prefix import prompt_block_hashes
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.instance.config import InstanceConfig
from simulator.traces.request import TraceRequest

_GRID = 28
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FluidWork:
    """What all requests of a workload have to have computed."""

    requests: int
    prompt_tokens: int
    """That no cache can have: each block that prompts share is counted once."""
    attended_tokens: int
    """Summed over those: the tokens that each attends to, itself included."""
    decoded_tokens: int
    """All generated tokens but the first of each request, which its prefill brings."""
    context_tokens: int
    """Summed over the decoded ones: the context that each is decoded with."""
    held_tokens: int
    """Summed over the decoded ones: their context without what prompts share."""


@dataclass(frozen=True, slots=True)
class FluidBound:
    """The bound, and what it is made of."""

    requests_per_s: float
    work: FluidWork
    instance_s: float
    """Least time in which one instance (of the mean speed) can do the work."""


def fluid_work(requests: Iterable[TraceRequest], block_tokens: int) -> FluidWork:
    """Add up the work of requests in their order."""
    seen: set[int] = set()
    count = prompt = attended = decoded = context = held = 0
    for request in requests:
        hashes = prompt_block_hashes(request, block_tokens)
        known = next((place for place, each in enumerate(hashes) if each not in seen), len(hashes))
        seen.update(hashes[known:])
        # The last token is always computed, for its output.
        cached = min(known * block_tokens, request.input_tokens - 1)
        fresh, steps = request.input_tokens - cached, request.output_tokens - 1
        count += 1
        prompt += fresh
        attended += fresh * cached + fresh * (fresh + 1) // 2
        decoded += steps
        generated = steps * (steps + 3) // 2  # 2, 3, ..., steps + 1: the token being computed included
        context += steps * request.input_tokens + generated
        held += steps * (fresh if hashes else request.input_tokens) + generated
    return FluidWork(count, prompt, attended, decoded, context, held)


def fluid_bound(
    requests: Sequence[TraceRequest], cluster: ClusterConfig, cost: CostModel, work: FluidWork | None = None
) -> FluidBound:
    """The bound for all instances of a cluster together. `work`: of the requests, if not by `fluid_work`. Raises
    `ConfigurationError` without a request."""
    if work is None:
        work = fluid_work(requests, cluster.instance.block_tokens)
    if not work.requests:
        raise ConfigurationError("the fluid bound of no requests is not defined; choose a trace with some")
    seconds: dict[tuple[int, int], float] = {}
    speed = 0.0
    for number in range(cluster.instances):
        spec = cluster.spec(number)
        model = spec.cost or cost
        key = (id(spec.config), id(model))
        if key not in seconds:
            seconds[key] = least_instance_s(work, spec.config, model)
        speed += 1 / seconds[key]
    return FluidBound(work.requests * speed, work, cluster.instances / speed)


def least_instance_s(work: FluidWork, config: InstanceConfig, cost: CostModel) -> float:
    """The least time in which one instance can do the work, in seconds."""
    kinds = _kinds(work, config)
    times_ms = np.array([cost.step_ms(_batch(work, decodes, prompt)) for decodes, prompt in kinds])
    decodes, prompts = (np.array(column, dtype=np.float64) for column in zip(*kinds, strict=True))
    return _cheapest_mix_ms(decodes, prompts, times_ms, work.decoded_tokens, work.prompt_tokens) / 1000


def _kinds(work: FluidWork, config: InstanceConfig) -> list[tuple[int, int]]:
    """(decodes, prompt tokens) of the steps that are tried."""
    most = config.max_batch_requests
    if work.decoded_tokens:
        memory_tokens = config.kv_blocks * config.block_tokens
        most = max(1, min(most, int(memory_tokens * work.decoded_tokens / max(work.held_tokens, 1))))
    else:
        most = 0
    kinds: set[tuple[int, int]] = set()
    for decodes in _spread(most):
        budget = config.max_step_tokens - decodes
        kinds.update((decodes, prompt) for prompt in _spread(budget if work.prompt_tokens else 0))
    kinds.discard((0, 0))
    return sorted(kinds)


def _spread(most: int) -> list[int]:
    """0, `most`, and numbers between them, denser near 0."""
    if most <= _GRID:
        return list(range(most + 1))
    return sorted({0, most, *np.rint(np.geomspace(1, most, _GRID)).astype(int).tolist()})


def _batch(work: FluidWork, decodes: int, prompt_tokens: int) -> BatchShape:
    context = round(work.context_tokens / work.decoded_tokens) if decodes else 0
    chunks: tuple[PrefillChunk, ...] = ()
    if prompt_tokens:
        # A chunk whose tokens attend on average to as many as the workload's do.
        attended = work.attended_tokens / work.prompt_tokens
        chunks = (PrefillChunk(prompt_tokens, max(0, round(attended - (prompt_tokens + 1) / 2))),)
        if prompt_tokens > 2 * attended:
            # No context at all would still be more: several prompts of the mean length share the step.
            length = max(1, int(2 * attended - 1))
            whole, rest = divmod(prompt_tokens, length)
            chunks = tuple(PrefillChunk(tokens, 0) for tokens in [length] * whole + [rest] * (rest > 0))
    contexts = np.full(decodes, context, dtype=np.int64)
    return BatchShape(chunks, contexts, decodes * context)


def _cheapest_mix_ms(decodes: Floats, prompts: Floats, times_ms: Floats, decoded: float, prompt: float) -> float:
    """Minimum of sum x T subject to both sums being reached, over all mixes of one or two kinds of steps."""
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.maximum(
            np.where(decodes > 0, decoded / decodes, np.inf if decoded else 0.0),
            np.where(prompts > 0, prompt / prompts, np.inf if prompt else 0.0),
        )
        best = float(np.min(needed * times_ms))
        # Two kinds that reach both sums exactly.
        determinant = np.outer(decodes, prompts) - np.outer(prompts, decodes)
        first = (decoded * prompts[None, :] - prompt * decodes[None, :]) / determinant
        second = (prompt * decodes[:, None] - decoded * prompts[:, None]) / determinant
        total = first * times_ms[:, None] + second * times_ms[None, :]
        feasible = np.isfinite(total) & (first >= 0) & (second >= 0)
    return min(best, float(total[feasible].min())) if feasible.any() else best
