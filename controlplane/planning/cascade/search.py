"""Thresholds of the lowest score, given how latency follows from them (Cascadia, section 3.3).

The paper defines the score, not the search. Here: the quantile grid of the judge's scores, then one threshold at a time
through its finer candidates around the best so far, until none gets better.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from controlplane.planning.cascade.allocation import lowest_latency_s
from controlplane.planning.cascade.objective import Objective
from controlplane.planning.cascade.routing import candidate_thresholds, route
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.tables import TierTable, latencies_of

GRID_POINTS = 600
FINE_CANDIDATES = 128
_MAX_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class Point:
    """A routing that was looked at."""

    thresholds: tuple[float, ...]
    latency_s: float
    """L: p95 of the slowest tier under the best allocation; infinite where no allocation holds the load."""
    quality: float


@dataclass(frozen=True, slots=True)
class Found:
    """The best routing, and all that were looked at."""

    best: Point
    score: float
    points: tuple[Point, ...]


class RoutingSearch:
    """Looks at each routing once."""

    def __init__(self, sample: CascadeSample, tables: Sequence[TierTable], gpus: int, objective: Objective) -> None:
        self._sample = sample
        self._tables = tables
        self._gpus = gpus
        self._objective = objective
        self._seen: dict[tuple[float, ...], Point] = {}

    def run(self, start: tuple[float, ...]) -> Found:
        """Search the grid and `start`, then refine the best."""
        thresholds = self._sample.tiers - 1
        most = max(4, round(GRID_POINTS ** (1 / thresholds))) if thresholds else 1
        grid = candidate_thresholds(self._sample, most)
        best = min(map(self._look, (start, *product(*grid))), key=self._rank)
        best = self._refine(best)
        return Found(best, self._objective.score(best.latency_s, best.quality), tuple(self._seen.values()))

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

    def _look(self, thresholds: tuple[float, ...]) -> Point:
        known = self._seen.get(thresholds)
        if known is None:
            routed = route(self._sample, thresholds)
            latency_s = lowest_latency_s(latencies_of(self._sample, routed, self._tables), self._gpus)
            known = self._seen[thresholds] = Point(thresholds, latency_s, routed.quality)
        return known

    def _rank(self, point: Point) -> tuple[float, float, tuple[float, ...]]:
        """Score; then quality; then the lower thresholds, so that equals are told apart alike every time."""
        return self._objective.score(point.latency_s, point.quality), -point.quality, point.thresholds


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in both latency and quality, by ascending latency."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda point: (point.latency_s, -point.quality)):
        if point.latency_s < float("inf") and (not kept or point.quality > kept[-1].quality):
            kept.append(point)
    return tuple(kept)
