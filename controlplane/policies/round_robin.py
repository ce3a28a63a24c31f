"""Round robin: each instance in its turn."""

from bisect import bisect_right
from typing import ClassVar

import numpy as np

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import among_candidates


class RoundRobin:
    """The next candidate in the order of instance ids, per model. Looks at no load, so it is also the named
    fallback where load cannot be trusted."""

    name: ClassVar[str] = "round_robin"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = "the next instance in turn; score = places after the last one chosen"
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._last_chosen: dict[str, str] = {}

    def decide(self, problem: PlacementProblem) -> Decision:
        instances, model = problem.snapshot.instances, problem.snapshot.model
        next_row = bisect_right(instances, self._last_chosen.get(model, ""), key=lambda i: i.instance_id)
        places = (np.arange(len(instances)) - next_row) % len(instances)
        scores = among_candidates(places, problem.candidates)
        row = int(scores.argmin())
        self._last_chosen[model] = instances[row].instance_id
        return Decision(row, scores)
