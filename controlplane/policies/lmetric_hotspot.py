"""LMetric with its hotspot detector in front of it (LMetric, section 5.2)."""

from typing import Annotated, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.hotspot_detector import ClassSighting, HotspotDetector
from controlplane.policies.lmetric import LMetric
from controlplane.policies.parameters import PolicyParameters


class HotspotParameters(PolicyParameters, frozen=True):
    """The window is the paper's minute; how many classes it tracks, and for how long equation 2 must have held before
    the filter ends, the paper leaves open.

    Any hold but a short one moves the hotspot instead of ending it: whoever cached the prefix last gets the whole
    class until the filter ends. With a class of 60 % of the requests on 4 instances, LMetric put 240 of 240 on one;
    a hold of 60 s put 228 on another; none put 80 on each of the three that equation 2 asks for.
    """

    window_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 60.0
    max_classes: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    hold_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 0.0


class LMetricHotspot:
    """LMetric, but requests of a hot class stay away from the instances that its prefix draws them to
    (LMetric, section 5.2; `HotspotDetector` has the rule).

    A request's class is the longest prefix of it that any candidate has cached, and M the candidates that have all
    of that. Rejected: a prefix of fixed length, which a system prompt shared by everyone makes one class. Equation 4
    is read as: LMetric's choice, ties and all, is in M, and M is busier than the others. Without that the detector
    sent coding agents away from the idle holders of 240,000 of their tokens, for nobody's good.
    """

    name: ClassVar[str] = "lmetric_hotspot"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = f"{LMetric.rule}; a hot prefix's requests avoid the instances that were overloaded by it"

    def __init__(self, parameters: HotspotParameters) -> None:
        self.parameters = parameters
        self._lmetric = LMetric()
        self._detectors: dict[str, HotspotDetector] = {}
        """By model; as many as are served."""

    def decide(self, problem: PlacementProblem) -> Decision:
        decision = self._lmetric.decide(problem)
        filtered_ids = self._filtered_ids(problem, decision.row)
        if not filtered_ids:
            return decision
        instances = problem.snapshot.instances
        kept = np.fromiter((i.instance_id not in filtered_ids for i in instances), np.bool_, len(instances))
        candidates = problem.candidates & kept
        if not candidates.any():
            return decision
        return self._lmetric.decide(msgspec.structs.replace(problem, candidates=candidates))

    def _filtered_ids(self, problem: PlacementProblem, lmetric_row: int) -> frozenset[str]:
        """Tell the detector of the request, and hear where it may not go."""
        now_s, detector = problem.request.now_s, self._detector(problem.request.model)
        cached_tokens = np.where(problem.candidates, problem.cached_tokens, 0)
        longest = int(cached_tokens.argmax())
        blocks = int(cached_tokens[longest]) // int(problem.snapshot.block_tokens[longest])
        if not blocks:
            detector.missed(now_s)
            return frozenset()
        holds: NDArray[np.bool_] = cached_tokens == cached_tokens[longest]
        holders = int(np.count_nonzero(holds))
        others = int(np.count_nonzero(problem.candidates)) - holders
        draws = bool(holds[lmetric_row]) and _are_busier(problem, holds)
        sighting = ClassSighting(
            problem.request.block_hashes[blocks - 1], holders, others, draws, int(cached_tokens[longest])
        )
        hot, alarm = detector.seen(now_s, sighting)
        if alarm:
            instances = problem.snapshot.instances
            detector.filter_out(hot, frozenset(instances[row].instance_id for row in np.flatnonzero(holds).tolist()))
        return hot.filtered_ids

    def _detector(self, model: str) -> HotspotDetector:
        known = self._detectors.get(model)
        if known is None:
            known = HotspotDetector(self.parameters.window_s, self.parameters.max_classes, self.parameters.hold_s)
            self._detectors[model] = known
        return known


def _are_busier(problem: PlacementProblem, holds: NDArray[np.bool_]) -> bool:
    """Whether the candidates that hold the prefix have more requests each than those that do not."""
    bs = problem.snapshot.batch_requests
    others = problem.candidates & ~holds
    return not others.any() or bool(bs[problem.candidates & holds].mean() > bs[others].mean())
