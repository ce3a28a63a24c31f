"""What judging costs a plan: how many answers are judged, and the GPUs that this takes."""

import math

from controlplane.planning.cascade.routing import Routed

UTILISATION = 0.7
"""Of a judge's GPUs: above, judgements would begin to queue."""


def judged_per_s(routed: Routed, rate_per_s: float) -> float:
    """Judgements a second under this routing. An answer that is given up counts too, which is an upper bound."""
    return rate_per_s * sum(share for share, judged in zip(routed.shares, routed.is_judged, strict=True) if judged)


def judge_gpus(routed: Routed, rate_per_s: float, judge_gpu_s: float) -> int:
    """GPUs that judges take, each judgement `judge_gpu_s` of GPU time; 0 where none judges, or judges run elsewhere."""
    return math.ceil(judged_per_s(routed, rate_per_s) * judge_gpu_s / UTILISATION - 1e-9)
