"""LMetric for clusters with idle instances: the request itself counts in the batch size."""

from typing import ClassVar

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import p_token
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class LMetricPlus:
    """score = P-token x (BS + 1), lowest wins: a variant of LMetric, section 5.

    The literal product is 0 on an idle instance, so that a busy instance loses to it whatever it has cached.
    With BS + 1, the batch size once the request is placed, the cache counts on idle instances too.
    """

    name: ClassVar[str] = "lmetric_plus"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = (
        "score = p_token x (bs + 1); p_token = queued prefill tokens + uncached prompt tokens, at least 1; "
        "bs = running + queued requests"
    )
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        tokens = p_token(problem)
        bs = problem.snapshot.batch_requests
        scores = among_candidates(tokens * (bs + 1), problem.candidates)
        turn = self._turns.next(problem.request.model)
        return Decision(
            lowest(scores, turn), scores, {"p_token": tokens, "bs": bs, "cached_tokens": problem.cached_tokens}
        )
