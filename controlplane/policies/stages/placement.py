"""The placement policy of staged instances (CascadeInfer, section 3.2)."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import total_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest
from controlplane.policies.stages.layout import StageLayout

OUTSIDE = -1
"""Stage of an instance that the layout does not know."""


class Stages:
    """The earliest stage whose range covers the request's length, and there the instance with the fewest tokens.

    The paper leaves the choice within a stage open; tokens (the contexts of all requests there) are the load that its
    instances compare among themselves. Where no candidate is left in the stage, the nearest one downstream serves the
    request, then the nearest upstream. Whoever runs the policy keeps the layouts current with `use_layout`; while a
    model has none, all its instances are one stage.
    """

    name: ClassVar[str] = "stages"
    rule: ClassVar[str] = (
        "the earliest stage whose length range covers the request, there score = total tokens; "
        "without a stage plan, all instances are one stage"
    )

    def __init__(self, *, round_robin: bool = False) -> None:
        """`round_robin` takes a stage's instances in turn, whatever their load: a rival."""
        self.parameters = PolicyParameters()
        self._round_robin = round_robin
        self._layouts: dict[str, StageLayout] = {}
        self._turns = RoundRobinCounter()

    @property
    def layouts(self) -> Mapping[str, StageLayout]:
        """By model, those in use."""
        return self._layouts

    def use_layout(self, model: str, layout: StageLayout | None) -> None:
        """From now on; None takes the model's away."""
        if layout is None:
            self._layouts.pop(model, None)
        else:
            self._layouts[model] = layout

    def decide(self, problem: PlacementProblem) -> Decision:
        """See `Policy`."""
        tokens = total_tokens(problem)
        indicators = {"total_tokens": tokens}
        candidates = problem.candidates
        layout = self._layouts.get(problem.snapshot.model)
        if layout is not None:
            indicators["stage"], candidates = stage_candidates(problem, layout)
        scores = among_candidates(np.zeros_like(tokens) if self._round_robin else tokens, candidates)
        turn = self._turns.next(problem.request.model)
        return Decision(lowest(scores, turn), scores, indicators)


def stage_candidates(problem: PlacementProblem, layout: StageLayout) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The stage of each row, and the candidates of the stage that is to serve the request."""
    stages = _stages(problem, layout)
    return stages, _of_nearest_stage(stages, problem.candidates, layout.stage_of(problem.request.prompt_tokens))


def _stages(problem: PlacementProblem, layout: StageLayout) -> NDArray[np.int64]:
    """The stage of each row."""
    places = {each: number for number, stage in enumerate(layout.stages) for each in stage}
    return np.array([places.get(each.instance_id, OUTSIDE) for each in problem.snapshot.instances], dtype=np.int64)


def _of_nearest_stage(stages: NDArray[np.int64], candidates: NDArray[np.bool_], wanted: int) -> NDArray[np.bool_]:
    """The candidates of the wanted stage or of the one that stands in for it; all where none is in any stage."""
    staged = candidates & (stages != OUTSIDE)
    there = np.unique(stages[staged])
    if not len(there):
        return candidates
    downstream = there[there >= wanted]
    nearest = downstream[0] if len(downstream) else there[-1]
    chosen: NDArray[np.bool_] = staged & (stages == nearest)
    return chosen
