"""Thresholds of the lowest score, given how latency follows from them (Cascadia, section 3.3).

The paper defines the score, not the search. Here: the quantile grid of the judge's scores, then one threshold at a time
through its finer candidates around the best so far, until none gets better; for a latency from end to end also two
thresholds at a time. A test holds that against all thresholds there are.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import inf

from controlplane.model.cascade_goal import Minimise
from controlplane.planning.cascade.allocation import lowest_latency_s
from controlplane.planning.cascade.judging import judge_gpus
from controlplane.planning.cascade.objective import Objective
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import TierTable, latencies_of

GRID_POINTS = 600
FINE_CANDIDATES = 128
_MAX_SWEEPS = 8
_STARTS = 4
_STRIDES = (8, 4, 2, 1)
_STEPS = tuple(range(-4, 5))


@dataclass(frozen=True, slots=True)
class Point:
    """A routing that the search has evaluated, with its latency and quality."""

    thresholds: tuple[float, ...]
    latency_s: float
    """L, in the sense of what is minimised, under the best allocation; infinite where none holds the load."""
    quality: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best routing, and all that were looked at."""

    best: Point
    score: float
    points: tuple[Point, ...]


class RoutingSearch:
    """Searches thresholds of the lowest score for fixed latency tables; evaluates each routing once."""

    def __init__(
        self,
        sample: CascadeSample,
        tables: Sequence[TierTable],
        gpus: int,
        objective: Objective,
        minimise: Minimise = "slowest_tier",
        judge_gpu_s: float = 0.0,
    ) -> None:
        """`tables` are of the statistic that `minimise` asks for; `judge_gpu_s` is the GPU time of a judgement."""
        self._sample = sample
        self._tables = tables
        self._gpus = gpus
        self._objective = objective
        self._minimise = minimise
        self._judge_gpu_s = judge_gpu_s
        self._seen: dict[tuple[float, ...], Point] = {}

    def run(self, start: tuple[float, ...]) -> SearchResult:
        """Search the grid and `start`, then refine the best; from end to end the best few."""
        thresholds = self._sample.tiers - 1
        most = max(4, round(GRID_POINTS ** (1 / thresholds))) if thresholds else 1
        grid = candidate_thresholds(self._sample, most)
        ranked = sorted(map(self._look, (start, *product(*grid))), key=self._rank)
        if self._minimise == "slowest_tier":
            best = self._refine(ranked[0])
        else:
            best = min((self._trade(self._refine(point)) for point in _apart(ranked)), key=self._rank)
        return SearchResult(best, self._objective.score(best.latency_s, best.quality), tuple(self._seen.values()))

    def _refine(self, best: Point) -> Point:
        fine = candidate_thresholds(self._sample, FINE_CANDIDATES)
        for _ in range(_MAX_SWEEPS):
            before = best
            for tier, candidates in enumerate(fine):
                tried = ((*best.thresholds[:tier], candidate, *best.thresholds[tier + 1 :]) for candidate in candidates)
                best = min((best, *map(self._look, tried)), key=self._rank)
            if best == before:
                break
        return best

    def _trade(self, best: Point) -> Point:
        """Move two thresholds at once: a sum can pay for fewer requests on one tier with more on another, where
        moving either alone would miss the target."""
        fine = candidate_thresholds(self._sample, FINE_CANDIDATES)
        for stride in _STRIDES:
            for _ in range(_MAX_SWEEPS):
                before = best
                for one, other in combinations(range(len(fine)), 2):
                    here = best.thresholds
                    near = (_near(fine[tier], here[tier], stride) for tier in (one, other))
                    tried = (_replaced(here, {one: first, other: second}) for first, second in product(*near))
                    best = min((best, *map(self._look, tried)), key=self._rank)
                if best == before:
                    break
        return best

    def _look(self, thresholds: tuple[float, ...]) -> Point:
        known = self._seen.get(thresholds)
        if known is None:
            routed = route(self._sample, thresholds)
            latencies_s = latencies_of(self._sample, routed, self._tables)
            gpus = self._gpus - judge_gpus(routed, self._sample.rate_per_s, self._judge_gpu_s)
            latency_s = lowest_latency_s(latencies_s, routed.shares, gpus, self._minimise) if gpus > 0 else inf
            known = self._seen[thresholds] = Point(thresholds, latency_s, routed.quality)
        return known

    def _rank(self, point: Point) -> tuple[float, float, tuple[float, ...]]:
        """Score; then quality; then the lower thresholds, so that ties are broken alike every time."""
        return self._objective.score(point.latency_s, point.quality), -point.quality, point.thresholds


def _apart(ranked: Sequence[Point]) -> list[Point]:
    """The best few that have no threshold in common."""
    chosen: list[Point] = []
    for point in ranked:
        if len(chosen) == _STARTS:
            break
        if not any(a == b for other in chosen for a, b in zip(point.thresholds, other.thresholds, strict=True)):
            chosen.append(point)
    return chosen


def _near(candidates: Sequence[float], threshold: float, stride: int) -> list[float]:
    """The threshold, and candidates around it at steps of `stride`."""
    at = bisect_left(candidates, threshold)
    return [threshold, *(candidates[i] for step in _STEPS if 0 <= (i := at + step * stride) < len(candidates))]


def _replaced(thresholds: tuple[float, ...], by: dict[int, float]) -> tuple[float, ...]:
    return tuple(by.get(tier, threshold) for tier, threshold in enumerate(thresholds))


def pareto_front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in both latency and quality, by ascending latency."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.latency_s, -point.quality)):
        if point.latency_s < float("inf") and (not kept or point.quality > kept[-1].quality):
            kept.append(point)
    return tuple(kept)
