"""One replica under load: what it sustains, and how long requests of given lengths take on it in its steady state.

A run begins empty, and a queue takes long to reach the length that it has from then on: at 0.9 of what a replica
sustains the first 1,000 requests have a 95th percentile that is a fifth lower. Nor do the last requests of a run have
as many beside them. So both ends of a run are not counted. And a run has exactly the rate and the lengths that it is
for, in random order, since at 0.9 a rate that is one per cent higher by chance makes requests wait a tenth longer.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.policies.registry import create_policy
from mesh.errors import PlanInfeasible
from simulator.cascade.tier import ReplicaModel
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.model import BatchShape, CostModel, PrefillChunk
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

_BATCHES = 4
"""A burst is so many times as long as a full batch."""
_MIN_BURST, _MAX_BURST = 300, 4000
_FILLED = 0.3
"""The part of a burst's answers that is not counted: the first batch ends then, whose short answers come first."""
_RELAXATIONS = 3.0
"""A run is counted after so many relaxation times: 5 % of what it began with is left then."""
_MIN_COUNTED, _MAX_WARM_UP = 300, 2000
_LASTING = 2.0
"""What long requests take beside others, over what they take alone: less where a run is near idle, more where it is
not."""


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


def saturation_per_s(
    replica: ReplicaModel, input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64], seed: int = 0
) -> float:
    """The rate that a replica sustains: what it serves while its queue never empties (the saturation rule; Baccelli and
    Foss, 1995).

    Raises `PlanInfeasible` if the replica refuses requests.
    """
    batch = full_batch(replica, input_tokens, output_tokens)
    count = int(np.clip(_BATCHES * batch, _MIN_BURST, _MAX_BURST))
    rows = drawn_rows(np.random.default_rng(seed), len(input_tokens), count)
    trace = [TraceRequest(0.0, int(input_tokens[row]), int(output_tokens[row])) for row in rows.tolist()]
    outcomes = _simulated(replica, trace, seed)
    ends_s = np.sort([outcome.finished_s for outcome in outcomes])
    from_s = float(ends_s[int(_FILLED * count)])
    until_s = max((outcome.ttft_ms or 0.0) / 1000 for outcome in outcomes)
    if until_s <= from_s:  # all were begun before a third had ended: the batch holds more than the estimate says
        from_s, until_s = 0.0, float(ends_s[-1])
    return float(((ends_s > from_s) & (ends_s <= until_s)).sum()) / (until_s - from_s)


def full_batch(replica: ReplicaModel, input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> int:
    """Requests of these lengths that a replica has under way at most, as its KV memory and its engines allow."""
    engine = replica.engine
    fits = engine.kv_blocks * engine.block_tokens / float(input_tokens.mean() + output_tokens.mean())
    return max(1, min(engine.max_batch_requests, int(fits))) * replica.engines


def relaxation_requests(utilisation: float) -> float:
    """How many requests a queue takes to forget how long it was, at this part of what it sustains: that of M/M/1, in
    services (Cohen, The single server queue, 1982)."""
    return float(1 / (1 - np.sqrt(utilisation)) ** 2)


def drawn_rows(rng: np.random.Generator, rows: int, count: int) -> NDArray[np.intp]:
    """`count` of so many rows, each as often as the others, in random order."""
    return rng.permutation(np.resize(rng.permutation(rows), count))


def drawn_arrivals_s(rng: np.random.Generator, rate_per_s: float, count: int) -> NDArray[np.float64]:
    """A Poisson process, scaled so that `count` arrivals take exactly as long as they do at this rate."""
    at: NDArray[np.float64] = np.cumsum(rng.exponential(1.0, count))
    scaled: NDArray[np.float64] = at * (count / rate_per_s / float(at[-1]))
    return scaled


def drawn_trace(
    rng: np.random.Generator,
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    rate_per_s: float,
    count: int,
) -> list[TraceRequest]:
    """`count` requests of these lengths, each as often as the others, that arrive at random at exactly this rate."""
    rows = drawn_rows(rng, len(input_tokens), count)
    arrivals_s = drawn_arrivals_s(rng, rate_per_s, count)
    return [
        TraceRequest(arrival_s, int(input_tokens[row]), int(output_tokens[row]))
        for arrival_s, row in zip(arrivals_s.tolist(), rows.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class LoadedLatency:
    """Arrival to last token of a replica's requests at one rate, in its steady state."""

    p95_s: float
    mean_s: float


def loaded_latency(
    replica: ReplicaModel,
    input_tokens: NDArray[np.int64],
    output_tokens: NDArray[np.int64],
    utilisation: float,
    saturation_per_s: float,
    seed: int,
) -> LoadedLatency:
    """One simulation at this part of the saturation, below 1. Requests are drawn from the given ones and arrive at
    random.

    Raises `PlanInfeasible` if the replica refuses requests.
    """
    assert 0 < utilisation < 1, "there is no steady state beyond saturation"
    rate_per_s = utilisation * saturation_per_s
    long_s = alone_s(
        replica.cost,
        replica.engine.max_step_tokens,
        round(input_tokens.mean()),
        int(np.quantile(output_tokens, 0.99)),
    )
    lasting = int(min(_LASTING * rate_per_s * long_s, _MAX_WARM_UP))
    warm_up = min(lasting + int(_RELAXATIONS * relaxation_requests(utilisation)), _MAX_WARM_UP)
    counted = max(_MIN_COUNTED, 2 * warm_up)
    count = warm_up + counted + lasting
    trace = drawn_trace(np.random.default_rng(seed), input_tokens, output_tokens, rate_per_s, count)
    latencies_ms = [outcome.e2e_ms for outcome in _simulated(replica, trace, seed)[warm_up : warm_up + counted]]
    return LoadedLatency(float(np.quantile(latencies_ms, 0.95)) / 1000, float(np.mean(latencies_ms)) / 1000)


def _simulated(replica: ReplicaModel, trace: list[TraceRequest], seed: int) -> list[RequestOutcome]:
    # A queue is measured here, not what a short one would turn away.
    engine = replace(replica.engine, max_queued_requests=len(trace))
    config = ClusterConfig(instances=replica.engines, instance=engine, report_interval_ms=0, seed=seed)
    outcomes = ClusterSimulation(trace, config, replica.cost, create_policy("least_loaded")).run()
    failed = next((outcome.error for outcome in outcomes if outcome.error), "")
    if failed:
        raise PlanInfeasible(f"a replica of {replica.shape} cannot serve the sample: {failed}")
    return outcomes
