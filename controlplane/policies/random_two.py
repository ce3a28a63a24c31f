"""The power of two random choices, a control without cache awareness (Mitzenmacher, 2001)."""

from typing import Annotated, ClassVar

import msgspec
import numpy as np

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import among_candidates


class RandomTwoParameters(PolicyParameters, frozen=True):
    """Equal seeds draw equal pairs."""

    seed: Annotated[int, msgspec.Meta(ge=0)] = 0


class RandomTwo:
    """Of two different candidates drawn at random, the one with the smaller batch; the first drawn if equal.

    A control that knows no cache (Mitzenmacher, The power of two choices in randomized load balancing, 2001).
    """

    name: ClassVar[str] = "random_two"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = "score = running + queued requests, of two instances drawn at random"

    def __init__(self, parameters: RandomTwoParameters) -> None:
        self.parameters = parameters
        self._generator = np.random.default_rng(parameters.seed)

    def decide(self, problem: PlacementProblem) -> Decision:
        rows = np.flatnonzero(problem.candidates)
        first = int(self._generator.integers(len(rows)))
        drawn = [int(rows[first])]
        if len(rows) > 1:
            # The second is drawn from the others: places from the first one's on move up by one.
            second = int(self._generator.integers(len(rows) - 1))
            drawn.append(int(rows[second + (second >= first)]))
        bs = problem.snapshot.batch_requests
        is_drawn = np.zeros(len(bs), dtype=np.bool_)
        is_drawn[drawn] = True
        row = min(drawn, key=lambda candidate: int(bs[candidate]))
        return Decision(row, among_candidates(bs, is_drawn), {"bs": bs})
