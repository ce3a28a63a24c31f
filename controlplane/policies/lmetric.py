"""LMetric: the product of new prefill tokens and batch size."""

from typing import ClassVar

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import p_token
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class LMetric:
    """score = P-token x BS, lowest wins (LMetric, section 5, figure 17b).

    P-token is what the instance would have to prefill if it got the request: prompt tokens still to be computed
    there plus the request's own uncached ones, at least 1. BS is its running plus queued requests. Both count
    requests placed but not yet reported. Idle instances all score 0 whatever their cache: P-token decides then.
    """

    name: ClassVar[str] = "lmetric"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = (
        "score = p_token x bs; p_token = queued prefill tokens + uncached prompt tokens, at least 1; "
        "bs = running + queued requests; ties go to the lowest p_token"
    )
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        tokens = p_token(problem)
        bs = problem.snapshot.batch_requests
        scores = among_candidates(tokens * bs, problem.candidates)
        turn = self._turns.next(problem.request.model)
        row = lowest(scores, turn, tie_break=tokens)
        return Decision(row, scores, {"p_token": tokens, "bs": bs, "cached_tokens": problem.cached_tokens})
