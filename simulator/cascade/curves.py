"""The source of a cascade's latency tables: replicas simulated over rates, and remembered."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.work import TierWork
from mesh.errors import PlanInfeasible
from simulator.cascade.replica import alone_s, loaded_latency, saturation_per_s
from simulator.cascade.tier import ReplicaModel, Tier

UTILISATIONS = (0.05, 0.35, 0.6, 0.8, 0.9)
"""Parts of what a replica sustains. Nothing is planned beyond the last: there a rate that is a few per cent higher than
foreseen makes a queue of minutes."""
LENGTH_STEP = 0.1
"""Requests whose mean and tail lengths are the same within this, relatively, share a curve."""


class StoredCurve(msgspec.Struct, frozen=True):
    """A measured curve, as it is kept."""

    key: str
    rates_per_s: tuple[float, ...]
    p95_s: tuple[float, ...]
    mean_s: tuple[float, ...]
    saturation_per_s: float


class SimulatedCurves:
    """A `CurveSource` over a sample: simulates what it has not simulated yet.

    Requests are told apart by mean and 95th percentile of their lengths only, in steps of 10 %: a routing that changes
    them less finds its curves measured. `known` are curves from before; `measured` those of now, to be kept. `on_curve`
    is called with the key of each curve before it is simulated.
    """

    def __init__(
        self,
        sample: CascadeSample,
        tiers: Sequence[Tier],
        *,
        seed: int = 0,
        known: Sequence[StoredCurve] = (),
        on_curve: Callable[[str], None] | None = None,
    ) -> None:
        self._sample = sample
        self._tiers = tiers
        self._replicas = [tier.replicas() for tier in tiers]
        self._seed = seed
        self._curves = {curve.key: curve for curve in known}
        self._on_curve = on_curve
        self._work = [self._work_alone(number) for number in range(len(tiers))]
        self.simulated = 0
        """Curves that were not known."""

    @property
    def measured(self) -> tuple[StoredCurve, ...]:
        """All curves known by now, to be stored for the next plan."""
        return tuple(self._curves.values())

    def work(self, tier: int) -> TierWork:
        """See `CurveSource`: on the smallest replica that holds the model."""
        return self._work[tier]

    def curves(
        self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]
    ) -> tuple[ReplicaCurve, ...]:
        """See `CurveSource`: of the shapes whose context is long enough. Raises `PlanInfeasible` where none is."""
        input_tokens = self._sample.input_tokens[requests]
        lengths = _lengths_key(input_tokens, output_tokens)
        longest = int((input_tokens + output_tokens).max())
        replicas = self._replicas[tier]
        holding = [replica for replica in replicas if replica.engine.max_model_len_tokens >= longest]
        if not holding:
            context_tokens = max(replica.engine.max_model_len_tokens for replica in replicas)
            raise PlanInfeasible(
                f"the sample has a request of {longest} tokens, prompt and answer, and no replica of "
                f"{self._tiers[tier].key} holds more than {context_tokens}: leave such requests out of the sample, or "
                "offer the tier more GPUs a replica"
            )
        return tuple(self._curve(tier, replica, lengths, input_tokens, output_tokens) for replica in holding)

    def _curve(
        self,
        tier: int,
        replica: ReplicaModel,
        lengths: str,
        input_tokens: NDArray[np.int64],
        output_tokens: NDArray[np.int64],
    ) -> ReplicaCurve:
        key = f"{self._tiers[tier].key}/{replica.shape}/{lengths}/{self._seed}"
        known = self._curves.get(key)
        if known is None:
            if self._on_curve is not None:
                self._on_curve(key)
            known = self._curves[key] = _measured(key, replica, input_tokens, output_tokens, self._seed)
            self.simulated += 1
        return ReplicaCurve(
            replica.shape,
            np.array(known.rates_per_s),
            np.array(known.p95_s),
            np.array(known.mean_s),
            known.saturation_per_s,
        )

    def _work_alone(self, tier: int) -> TierWork:
        replica = self._replicas[tier][0]
        step_tokens = replica.engine.max_step_tokens
        input_tokens, output_tokens = self._sample.input_tokens.tolist(), self._sample.output_tokens[:, tier]
        lengths = zip(input_tokens, output_tokens.tolist(), strict=True)
        return TierWork(
            prefill_s=np.array([alone_s(replica.cost, step_tokens, inputs, 1) for inputs in input_tokens]),
            whole_s=np.array([alone_s(replica.cost, step_tokens, inputs, outputs) for inputs, outputs in lengths]),
            output_tokens=output_tokens,
        )


def _measured(
    key: str, replica: ReplicaModel, input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64], seed: int
) -> StoredCurve:
    saturation = saturation_per_s(replica, input_tokens, output_tokens, seed)
    latencies = [loaded_latency(replica, input_tokens, output_tokens, part, saturation, seed) for part in UTILISATIONS]
    return StoredCurve(
        key,
        rates_per_s=tuple(part * saturation for part in UTILISATIONS),
        p95_s=tuple(at.p95_s for at in latencies),
        mean_s=tuple(at.mean_s for at in latencies),
        saturation_per_s=saturation,
    )


def _lengths_key(input_tokens: NDArray[np.int64], output_tokens: NDArray[np.int64]) -> str:
    """Means and tails in logarithmic steps."""
    figures = [
        float(input_tokens.mean()),
        float(np.quantile(input_tokens, 0.95)),
        float(output_tokens.mean()),
        float(np.quantile(output_tokens, 0.95)),
    ]
    return "-".join(str(round(np.log(figure) / np.log1p(LENGTH_STEP))) for figure in figures)
