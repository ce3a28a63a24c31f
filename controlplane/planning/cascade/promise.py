"""Thresholds that hold a quality with a stated probability.

Thresholds that just reach the target on the requests that they were chosen by miss it half of the time on others. So
the sample is divided: one part chooses routings, ordered from the best to the fastest; the other, which none of them
was chosen by, tests them in this order until one fails. The last that passed is planned. As the order is fixed before
the test begins, no more than the first wrong routing can pass wrongly, and the promise needs no correction for how
many were tried (fixed sequence testing; Angelopoulos et al., Learn then test, 2021).

What it takes for granted: that the requests to come are like those of the sample. Live sampling goes on checking that
(`quality_watch`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.cascade_record import MAX_SCORE
from controlplane.planning.cascade.bilevel import PlanRequest, PlanResult, plan, plan_for
from controlplane.planning.cascade.bounds import lower_bound, reaches
from controlplane.planning.cascade.replica import ReplicaCurve
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.search import Point, pareto_front
from controlplane.planning.cascade.tables import CurveSource
from controlplane.planning.cascade.work import TierWork
from mesh.errors import PlanInfeasible

CHOOSING_SHARE = 0.4
"""Of the requests; the others test. Tests need more: that is where the margin comes from."""
MIN_CHECKED = 10
"""Labelled requests to test by; were all of ten right, 70 could be promised with 95 %."""
_AIM_MARGIN = 3.0
"""In standard errors of the test: so far above the target it passes mostly. The search is the finest there."""
_COARSE = 12
_TIMES = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""As many samples: whether so many would have done is told to whoever had too few."""


class QualityPromise(msgspec.Struct, frozen=True):
    """What a plan promises of the mean quality of accepted answers."""

    quality: float
    """At least this, 0 to 100."""
    probability: float
    """In per cent."""
    lower: float
    """What the next requests reach with that probability: at least `quality`."""
    tested: float
    """The mean on the requests that the thresholds were not chosen by."""
    samples: int
    """Labelled requests that tested it."""
    label: str = ""
    """Who labelled them; empty: the plan's input does not say."""


def plan_as_asked(
    sample: CascadeSample, source: CurveSource, request: PlanRequest, probability: float, label: str = "", seed: int = 0
) -> tuple[PlanResult, QualityPromise | None]:
    """A plan that holds its quality with this probability, in per cent; one that just reaches it on the sample, or that
    is asked for by a latency, promises nothing. 0: just reach it. Raises `PlanInfeasible`."""
    if request.quality is None or not probability:
        return plan(sample, source, request), None
    result, promise = plan_with_promise(sample, source, request, probability, seed)
    return result, msgspec.structs.replace(promise, label=label)


def plan_with_promise(
    sample: CascadeSample,
    source: CurveSource,
    request: PlanRequest,
    probability: float,
    seed: int = 0,
) -> tuple[PlanResult, QualityPromise]:
    """The fastest plan of those that hold `request.quality` with this probability, in per cent, between 0 and 100.

    `seed` divides the sample. Raises `PlanInfeasible`, with what is missing, where none does.
    """
    target = request.quality
    assert target is not None, "only a quality can be promised"
    choosing, checking = divided(sample, seed)
    if len(checking) < MIN_CHECKED:
        raise PlanInfeasible(
            f"a quality of {target:g} cannot be promised with {probability:g} %: {len(checking)} labelled requests are "
            f"left to test it by, {MIN_CHECKED} are the least; label more samples"
        )
    chosen_by, tested_by = sample.only(choosing), sample.only(checking)
    ladder, points = _ladder(chosen_by, PartOfSource(source, choosing), request, target, len(checking))
    kept: tuple[float, ...] | None = None
    for thresholds in ladder:
        if not reaches(accepted_quality(tested_by, thresholds), target, probability / 100):
            break
        kept = thresholds
    if kept is None:
        raise PlanInfeasible(_refusal(tested_by, ladder[0], target, probability, sample.requests))
    accepted = accepted_quality(tested_by, kept)
    promise = QualityPromise(
        quality=target,
        probability=probability,
        lower=max(target, lower_bound(accepted, probability / 100)),
        tested=float(accepted.mean()),
        samples=len(accepted),
    )
    return plan_for(sample, source, request, kept, points), promise


def divided(sample: CascadeSample, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Requests (indices, in random order) to choose thresholds by, and to test them by; the latter have labels for all
    of their answers. Requests without labels choose."""
    is_labelled: NDArray[np.bool_] = np.all(sample.is_labelled, axis=1)
    if sample.tiers == 1:  # there is nothing to choose
        return np.arange(sample.requests), np.flatnonzero(is_labelled)
    rng = np.random.default_rng(seed)
    shuffled = rng.permutation(sample.requests)
    with_labels = shuffled[is_labelled[shuffled]]
    choosing = round(CHOOSING_SHARE * len(with_labels))
    return np.concatenate([with_labels[:choosing], shuffled[~is_labelled[shuffled]]]), with_labels[choosing:]


def accepted_quality(sample: CascadeSample, thresholds: Sequence[float]) -> NDArray[np.float64]:
    """The quality of the answer that each request gets; shape (n,)."""
    quality: NDArray[np.float64] = sample.true_quality[
        np.arange(sample.requests), route(sample, thresholds).answered_by
    ]
    return quality


@dataclass(frozen=True, slots=True, eq=False)
class PartOfSource:
    """A `CurveSource` of some of another's requests."""

    source: CurveSource
    rows: NDArray[np.intp]

    def curves(self, tier: int, requests: NDArray[np.intp], output_tokens: NDArray[np.int64]) -> Sequence[ReplicaCurve]:
        return self.source.curves(tier, self.rows[requests], output_tokens)

    def work(self, tier: int) -> TierWork:
        return self.source.work(tier).only(self.rows)


def _ladder(
    sample: CascadeSample,
    source: CurveSource,
    request: PlanRequest,
    target: float,
    tests: int,
) -> tuple[list[tuple[float, ...]], tuple[Point, ...]]:
    """Routings to test, best first: those that no other beats in both quality and latency, on the requests that choose.
    And all that were looked at."""
    error = float(sample.true_quality.std(axis=0).max()) / tests**0.5
    best = max(route(sample, thresholds).quality for thresholds in product(*candidate_thresholds(sample, _COARSE)))
    aims = sorted({min(best, MAX_SCORE, target + _AIM_MARGIN * error), target}, reverse=True)
    for aim in aims:
        try:
            found = plan(sample, source, replace(request, quality=aim))
            break
        except PlanInfeasible:
            if aim == aims[-1]:
                raise
    front = pareto_front((*found.points, Point(found.thresholds, found.deployment.latency_s, found.routed.quality)))
    rungs = [point for point in reversed(front) if point.quality >= target]
    return [point.thresholds for point in rungs] or [found.thresholds], found.points


def _refusal(
    tested_by: CascadeSample, thresholds: tuple[float, ...], target: float, probability: float, requests: int
) -> str:
    accepted = accepted_quality(tested_by, thresholds)
    lower = lower_bound(accepted, probability / 100)
    found = (
        f"a quality of {target:g} is not held with {probability:g} %: the best thresholds that were tried reach "
        f"{accepted.mean():.1f} on the {len(accepted)} labelled requests that they were not chosen by, which promises "
        f"{lower:.1f}"
    )
    enough = next((times for times in _TIMES if reaches(np.tile(accepted, times), target, probability / 100)), None)
    if enough is None:
        return f"{found}; lower the target, give more GPUs or add a better tier"
    return (
        f"{found}; about {enough * requests} labelled samples like these would do, or a lower target, or a better tier"
    )
