"""How long a cascade's plan takes once its latency tables are known, by GPUs and by what is minimised.

    python -m benchmarks.cascade_planning [--gpus 32 80] [--json planning.json]

Three tiers as in Cascadia's experiments, in every shape that they fit on, and a workload whose scores all differ, which
gives the search the most thresholds to tell apart; once with answers that are always written to their end, once with
such as a tier gives up early, with some dozen bounds on their scores each. The tables are simulated first (some
minutes); then every plan is made once unmeasured and `--repeats` times measured, in CPU time of this process."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult, plan
from controlplane.planning.cascade.early_exit import ScoreBounds
from controlplane.planning.cascade.sample import CascadeSample
from simulator.cascade.curves import SimulatedCurves
from simulator.cascade.tier import MAX_REPLICA_GPUS, TierModel

TIERS = (
    TierModel("R1-Distill-Qwen-7B", "H100"),
    TierModel("Llama-3.3-70B", "H100"),
    TierModel("DeepSeek-R1", "H100", "fp4"),
)
RATE_PER_S_PER_GPU = 0.5
JUDGE_S = 1.0
PART_OF_THE_WAY = 0.7
"""The quality target, from the smallest tier's quality to the largest's."""
BOUNDS_PER_ANSWER = (10, 60)
"""Of an answer, from and below; those of running confidences of answers of some hundred tokens are fewer."""


def sample_of(seed: int, requests: int, tiers: int) -> CascadeSample:
    """A judge that is often right about answers that are right the more often, the larger the tier."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(0, 0.8, (requests, 1))
    is_right = rng.normal(0.9 * np.arange(tiers), 1, (requests, tiers)) > hard
    return CascadeSample(
        scores=np.clip(55 + 20 * is_right + rng.normal(0, 10, is_right.shape), 0, 100),
        input_tokens=rng.integers(20, 2000, requests),
        output_tokens=rng.integers(50, 500, is_right.shape),
        rate_per_s=1.0,
        quality=100.0 * is_right.astype(np.float64),
    )


def with_score_bounds(sample: CascadeSample, seed: int) -> CascadeSample:
    """The same answers, whose scores fell at any tokens from 100 to what they are."""
    rng = np.random.default_rng(seed)

    def score_bounds(tokens: int, score: float) -> ScoreBounds:
        at = 1 + np.sort(rng.permutation(tokens)[: rng.integers(*BOUNDS_PER_ANSWER)])
        scores = np.sort(np.append(rng.uniform(score, 100, len(at) - 1), score))[::-1]
        return tuple(zip(at.tolist(), scores.tolist(), strict=True))

    answers = zip(sample.output_tokens.tolist(), sample.scores.tolist(), strict=True)
    return replace(sample, score_bounds=tuple(tuple(map(score_bounds, *answer)) for answer in answers))


def at_rate(sample: CascadeSample, rate_per_s: float) -> CascadeSample:
    """The same requests at another rate."""
    return replace(sample, rate_per_s=rate_per_s)


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs and each latency, for whole answers and for such as are given up."""
    tiers = [replace(tier, max_gpus=arguments.replica_gpus) for tier in TIERS[: arguments.tiers]]
    base = sample_of(arguments.seed, arguments.requests, len(tiers))
    by_tier = base.true_quality.mean(axis=0)
    quality = float(by_tier[0] + PART_OF_THE_WAY * (by_tier[-1] - by_tier[0]))
    known = SimulatedCurves(base, tiers, seed=arguments.seed)
    kinds: tuple[Minimise, ...] = ("slowest_tier", "end_to_end")
    answers = (base, with_score_bounds(base, arguments.seed))
    for gpus, minimise, of_answers in product(arguments.gpus, kinds, answers):
        sample = at_rate(of_answers, RATE_PER_S_PER_GPU * gpus)
        source = SimulatedCurves(sample, tiers, seed=arguments.seed, known=known.measured)
        request = PlanRequest(gpus=gpus, quality=quality, judge_s=JUDGE_S, minimise=minimise)
        planned = plan(sample, source, request)
        known = source
        seconds = [cpu_s(sample, source, request) for _ in range(arguments.repeats)]
        yield _row(gpus, minimise, of_answers.score_bounds is not None, planned, seconds)


def cpu_s(sample: CascadeSample, source: SimulatedCurves, request: PlanRequest) -> float:
    """CPU seconds that one plan takes."""
    before_s = time.process_time()
    plan(sample, source, request)
    return time.process_time() - before_s


def _row(gpus: int, minimise: Minimise, gives_up: bool, planned: PlanResult, seconds: list[float]) -> dict[str, Any]:
    shares = planned.routed.shares
    return {
        "gpus": gpus,
        "minimise": minimise,
        "gives_up": gives_up,
        "cpu_s": round(statistics.median(seconds), 3),
        "rounds": len(planned.scores),
        "quality": planned.routed.quality,
        "shares": shares,
        "p95_s": max(planned.p95_s),
        "mean_s": sum(share * mean_s for share, mean_s in zip(shares, planned.mean_s, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[32, 80])
    parser.add_argument("--tiers", type=int, default=len(TIERS), help="so many, from the smallest on")
    parser.add_argument("--replica-gpus", type=int, default=MAX_REPLICA_GPUS, help="that a replica has at most")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in measure(arguments):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    document = json.dumps({"plans": rows}, indent=2) + "\n"
    if arguments.json is not None:
        arguments.json.write_text(document)
    print(document, end="")


if __name__ == "__main__":
    main()
