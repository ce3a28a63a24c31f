"""What one replica among several sustains at steady rates, by simulating them request by request (pure)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.autoscale.capacity import CapacityCurve
from controlplane.policies.registry import create_policy
from mesh.errors import PlanInfeasible
from simulator.cascade.tier import ReplicaModel
from simulator.cluster.config import ClusterConfig
from simulator.cluster.simulation import ClusterSimulation
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.report.outcome import RequestOutcome
from simulator.traces.request import TraceRequest

UTILISATIONS = (0.1, 0.3, 0.5, 0.65, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.1)
"""Of the estimated saturation; it ends after two rates at which hardly any request is in time."""
LOST_SHARE = 0.05
WARM_UP = 0.25
"""Of a run: not counted, since it begins empty."""


@dataclass(frozen=True, slots=True)
class SloLimits:
    """Of a request; None: any time will do."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def kept_by(self, outcome: RequestOutcome) -> bool:
        """Whether it was within all limits."""
        if outcome.error:
            return False
        ttft_ms, tpot_ms = outcome.ttft_ms, outcome.tpot_ms
        return (
            (self.ttft_ms is None or (ttft_ms is not None and ttft_ms <= self.ttft_ms))
            and (self.tpot_ms is None or tpot_ms is None or tpot_ms <= self.tpot_ms)
            and (self.e2e_ms is None or outcome.e2e_ms <= self.e2e_ms)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """Requests to draw from, each as likely."""

    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]


def capacity_curve(
    replica: ReplicaModel, lengths: Lengths, slo: SloLimits, *, pool: int, requests: int, policy: str, seed: int
) -> CapacityCurve:
    """Simulate `pool` such replicas under `policy`, `requests` of them at each rate, drawn and spaced alike (Poisson).

    Raises `PlanInfeasible` where a replica refuses requests of these lengths.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(lengths.input_tokens), requests)
    unit_s = np.cumsum(rng.exponential(1.0, requests))
    saturation = _estimated_saturation_per_s(replica, lengths)
    rates: list[float] = []
    shares: list[float] = []
    in_flight: list[float] = []
    lost = 0
    for utilisation in UTILISATIONS:
        rate = utilisation * saturation
        trace = [
            TraceRequest(at_s, int(lengths.input_tokens[row]), max(1, int(lengths.output_tokens[row])))
            for at_s, row in zip((unit_s / (rate * pool)).tolist(), drawn.tolist(), strict=True)
        ]
        config = ClusterConfig(instances=pool * replica.engines, instance=replica.engine, seed=seed)
        outcomes = ClusterSimulation(trace, config, replica.cost, create_policy(policy)).run()
        failed = next((outcome.error for outcome in outcomes if outcome.error), "")
        if failed:
            raise PlanInfeasible(f"a replica of {replica.shape} cannot serve requests of these lengths: {failed}")
        counted = outcomes[int(WARM_UP * requests) :]
        share = sum(map(slo.kept_by, counted)) / len(counted)
        rates.append(rate)
        shares.append(min(share, shares[-1]) if shares else share)
        # Little: requests under way are the rate times the time that each takes.
        in_flight.append(rate * float(np.mean([outcome.e2e_ms for outcome in counted])) / 1000)
        lost = lost + 1 if share < LOST_SHARE else 0
        if lost == 2:
            break
    return CapacityCurve(tuple(rates), tuple(shares), tuple(in_flight), saturation)


def _estimated_saturation_per_s(replica: ReplicaModel, lengths: Lengths) -> float:
    """The rate at which a replica's batches are full all the time, from the cost of a full batch's step. A few per cent
    off what `simulator.cascade.replica.saturation_per_s` measures: here it only spaces the rates.

    A batch is full when the requests' KV fills the memory, or at the limit of requests. The rate is where its decode
    steps and its prefills take all the time there is; prefills ride in steps of their own here, which is pessimistic
    by what they would have saved in weights read once.
    """
    engine, cost = replica.engine, replica.cost
    mean_input, mean_output = float(lengths.input_tokens.mean()), float(lengths.output_tokens.mean())
    context = mean_input + mean_output / 2
    fits = engine.kv_blocks * engine.block_tokens / (mean_input + mean_output)
    batch = max(1, min(engine.max_batch_requests, int(fits)))
    contexts = np.full(batch, round(context), np.int64)
    decode_ms = cost.step_ms(BatchShape((), contexts, int(contexts.sum()))) * mean_output / batch
    chunk = max(1, min(engine.max_step_tokens, round(mean_input)))
    prefill_ms = cost.step_ms(BatchShape(prefill=(PrefillChunk(chunk, 0),))) * mean_input / chunk
    return 1000.0 / (decode_ms + prefill_ms) * replica.engines
