"""Stands in for the answers of tiers that were not there to give them, by those to the most alike requests."""

import math
from collections.abc import Sequence

import msgspec

from controlplane.planning.cascade.drift import DriftSettings
from controlplane.planning.cascade.workload import WorkloadRequest

_SCALE = DriftSettings()
"""One unit apart are requests that differ by as much as two workloads must to count as drifted."""


def impute_tier(
    requests: Sequence[WorkloadRequest], tier: int, donors: Sequence[WorkloadRequest]
) -> tuple[WorkloadRequest, ...]:
    """The requests, with this tier's score, label, tokens and score bounds in those that lack them taken together from
    the most alike donor: nearest in input tokens and in the scores known on both. Of equally near ones the first.
    Donors must have the tier, and there must be one at least.

    Why not the tier's mean: a plan decides by scores on several tiers at once which requests stop where. What is hard
    for one tier is hard for the next, and long answers are long on both; means would make every request as hard as any
    other for the tier that is gone. Why take an answer as a whole: its score, its length and its score bounds belong
    together. What it cannot know is whether the tier has changed since: whoever plans with them says how old the
    answers are."""
    return tuple(
        request if request.scores[tier] is not None else _with_answer(request, tier, _nearest(request, donors))
        for request in requests
    )


def _with_answer(request: WorkloadRequest, tier: int, donor: WorkloadRequest) -> WorkloadRequest:
    quality = score_bounds = None
    if request.quality is not None and donor.quality is not None:
        quality = _put(request.quality, tier, donor.quality[tier])
    if request.score_bounds is not None and donor.score_bounds is not None:
        score_bounds = _put(request.score_bounds, tier, donor.score_bounds[tier])
    return msgspec.structs.replace(
        request,
        output_tokens=_put(request.output_tokens, tier, donor.output_tokens[tier]),
        scores=_put(request.scores, tier, donor.scores[tier]),
        quality=quality,
        score_bounds=score_bounds,
    )


def _put(values: tuple[object, ...], place: int, value: object) -> tuple[object, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _nearest(request: WorkloadRequest, donors: Sequence[WorkloadRequest]) -> WorkloadRequest:
    return min(donors, key=lambda donor: _distance(request, donor))


def _distance(one: WorkloadRequest, other: WorkloadRequest) -> float:
    """Squared. Scores count as their mean over the tiers known on both, so that one tier more or fewer does not make a
    request more alike; without any the scores count as one unit apart."""
    lengths = math.log(one.input_tokens / other.input_tokens) / math.log(_SCALE.ratio)
    known = [
        ((mine - theirs) / _SCALE.score_points) ** 2
        for mine, theirs in zip(one.scores, other.scores, strict=True)
        if mine is not None and theirs is not None
    ]
    return lengths**2 + (sum(known) / len(known) if known else 1.0)
