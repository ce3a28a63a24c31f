"""The linear combination of cache hits and load."""

from typing import Annotated, ClassVar

import msgspec

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import kv_hit
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class LinearParameters(PolicyParameters, frozen=True):
    """The default is the paper's best weight for its chat trace (LMetric, section 4.4; 0.55 for its API trace)."""

    cache_weight: Annotated[float, msgspec.Meta(ge=0, le=1)] = msgspec.field(default=0.7, name="lambda")


class Linear:
    """score = lambda x (1 - kv_hit) + (1 - lambda) x norm(BS), lowest wins (LMetric, figure 6b: Bailian's).

    kv_hit is the fraction of the prompt that is cached. norm(BS) divides by the largest batch size among the
    candidates; the paper asks for [0, 1] and does not say how.
    """

    name: ClassVar[str] = "linear"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = (
        "score = lambda x (1 - cached tokens / prompt tokens) + (1 - lambda) x bs / largest bs; "
        "bs = running + queued requests"
    )

    def __init__(self, parameters: LinearParameters) -> None:
        self.parameters = parameters
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        bs = problem.snapshot.batch_requests
        largest = max(int(bs[problem.candidates].max()), 1)
        weight = self.parameters.cache_weight
        combined = weight * (1 - kv_hit(problem)) + (1 - weight) * (bs / largest)
        scores = among_candidates(combined, problem.candidates)
        turn = self._turns.next(problem.request.model)
        return Decision(lowest(scores, turn), scores, {"bs": bs, "cached_tokens": problem.cached_tokens})
