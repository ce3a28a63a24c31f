"""Replicas with a latency in closed form, in place of simulations: tail or mean of work / (1 - utilisation)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from controlplane.planning.cascade.early_exit import ScoreBounds
from controlplane.planning.cascade.replica import ReplicaCurve, ReplicaShape
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.work import TierWork

UTILISATIONS = np.array([0.01, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95])


class AnalyticSource:
    """Tier i does a token of work in `token_s[i]` on one GPU, and on g GPUs in 1 / g**0.8 of that."""

    def __init__(
        self, sample: CascadeSample, token_s: Sequence[float], shapes: Sequence[tuple[ReplicaShape, ...]]
    ) -> None:
        self.sample = sample
        self.token_s = token_s
        self.shapes = shapes
        self.asked = 0

    def work(self, tier: int) -> TierWork:
        output_tokens = self.sample.output_tokens[:, tier]
        first_s = np.full(len(output_tokens), self.token_s[tier])
        return TierWork(first_s, output_tokens * self.token_s[tier], output_tokens)

    def curves(
        self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]
    ) -> tuple[ReplicaCurve, ...]:
        self.asked += 1
        assert output_tokens.shape == requests.shape
        work_s = output_tokens * self.token_s[tier]
        tail_s = float(np.sort(work_s)[int(0.95 * (len(work_s) - 1))])
        curves = []
        for shape in self.shapes[tier]:
            speed = shape.gpus**0.8
            rates = UTILISATIONS * speed / work_s.mean()
            p95_s, mean_s = (alone_s / speed / (1 - UTILISATIONS) for alone_s in (tail_s, work_s.mean()))
            curves.append(ReplicaCurve(shape, rates, p95_s, mean_s, speed / work_s.mean()))
        return tuple(curves)


def random_sample(seed: int, requests: int, tiers: int, rate_per_s: float = 2.0, levels: int = 5) -> CascadeSample:
    """Scores of few distinct values, on average rising with the tier."""
    rng = np.random.default_rng(seed)
    skill = np.linspace(0.35, 0.9, tiers)
    scores = rng.binomial(levels, skill, (requests, tiers)) * (100.0 / levels)
    return CascadeSample(
        scores=scores,
        input_tokens=rng.integers(10, 2000, requests),
        output_tokens=rng.integers(10, 500, (requests, tiers)),
        rate_per_s=rate_per_s,
    )


def with_score_bounds(sample: CascadeSample, seed: int) -> CascadeSample:
    """The same answers; their scores fell from 100 to what they are in a few steps, mostly early ones."""
    rng = np.random.default_rng((seed, 1))

    def score_bounds(tokens: int, score: float) -> ScoreBounds:
        if score == 100:
            return ()
        steps = int(rng.integers(1, min(6, tokens) + 1))
        at = np.sort(rng.permutation(tokens // 2 + 1)[:steps] + 1)
        scores = np.sort(rng.uniform(score, 100, len(at)))[::-1]
        scores[-1] = score
        return tuple(zip(at.tolist(), scores.tolist(), strict=True))

    answers = zip(sample.output_tokens.tolist(), sample.scores.tolist(), strict=True)
    return replace(sample, score_bounds=tuple(tuple(map(score_bounds, tokens, scores)) for tokens, scores in answers))
