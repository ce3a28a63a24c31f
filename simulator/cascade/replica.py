"""One replica under load: how long requests of given lengths take on it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.registry import create_policy
from mesh.errors import PlanInfeasible
from simulator.cascade.tier import ReplicaModel
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.traces.request import TraceRequest

_MIN_REQUESTS = 120
_MAX_REQUESTS = 1000
_CONCURRENCIES = 3.0
"""A run is so many times as long as the batch under way, or a queue would have no time to build up."""


def alone_s(cost: CostModel, engine_step_tokens: int, input_tokens: int, output_tokens: int) -> float:
    """What one request takes on an idle replica: its prompt in chunks, then a token a step."""
    prefill_ms, done = 0.0, 0
    while done < input_tokens:
        chunk = min(engine_step_tokens, input_tokens - done)
        prefill_ms += cost.step_ms(BatchShape(prefill=(PrefillChunk(chunk, done),)))
        done += chunk
    if output_tokens < 2:
        return prefill_ms / 1000
    context = np.array([input_tokens + 1], np.int64)
    run_ms = cost.decode_run_ms(BatchShape((), context, input_tokens + 1), output_tokens - 1)
    return (prefill_ms + float(run_ms.sum())) / 1000


def saturation_per_s(replica: ReplicaModel, input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> float:
    """The rate at which a replica's batches are full all the time, from the cost of a full batch's step.

    A batch is full when the requests' KV fills the memory, or at the limit of requests. The rate is where its decode
    steps and its prefills take all the time there is; prefills ride in steps of their own here, which is pessimistic
    by what they would have saved in weights read once.
    """
    engine, cost = replica.engine, replica.cost
    mean_input, mean_output = float(input_tokens.mean()), float(output_tokens.mean())
    context = mean_input + mean_output / 2
    fits = engine.kv_blocks * engine.block_tokens / (mean_input + mean_output)
    batch = max(1, min(engine.max_batch_requests, int(fits)))
    contexts = np.full(batch, round(context), np.int64)
    decode_ms = cost.step_ms(BatchShape((), contexts, int(contexts.sum()))) * mean_output / batch
    chunk = max(1, min(engine.max_step_tokens, round(mean_input)))
    prefill_ms = cost.step_ms(BatchShape(prefill=(PrefillChunk(chunk, 0),))) * mean_input / chunk
    return 1000.0 / (decode_ms + prefill_ms) * replica.engines


@dataclass(frozen=True, slots=True)
class LoadedLatency:
    """Arrival to last token of a replica's requests at one rate."""

    p95_s: float
    mean_s: float


def loaded_latency(
    replica: ReplicaModel,
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    rate_per_s: float,
    alone: float,
    seed: int,
) -> LoadedLatency:
    """One simulation, for requests drawn from the given ones that arrive at random (Poisson).

    `alone`: mean time of one request by itself, which tells how many there must be. Runs of equal seed draw alike, so
    that two rates or two shapes differ by nothing else. Raises `PlanInfeasible` if the replica refuses requests.
    """
    rng = np.random.default_rng(seed)
    count = int(np.clip(_CONCURRENCIES * rate_per_s * alone, _MIN_REQUESTS, _MAX_REQUESTS))
    drawn = rng.permutation(np.resize(np.arange(len(input_tokens)), _MAX_REQUESTS))[:count]
    gaps = rng.exponential(1.0, _MAX_REQUESTS)[:count]
    arrivals_s = np.cumsum(gaps) / rate_per_s
    trace = [
        TraceRequest(arrival_s, int(input_tokens[row]), int(output_tokens[row]))
        for arrival_s, row in zip(arrivals_s.tolist(), drawn.tolist(), strict=True)
    ]
    config = ClusterConfig(instances=replica.engines, instance=replica.engine, report_interval_ms=0, seed=seed)
    outcomes = ClusterSimulation(trace, config, replica.cost, create_policy("least_loaded")).run()
    failed = next((outcome.error for outcome in outcomes if outcome.error), "")
    if failed:
        raise PlanInfeasible(f"a replica of {replica.shape} cannot serve the sample: {failed}")
    latencies_ms = [outcome.e2e_ms for outcome in outcomes]
    return LoadedLatency(float(np.quantile(latencies_ms, 0.95)) / 1000, float(np.mean(latencies_ms)) / 1000)
