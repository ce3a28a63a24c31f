"""LMetric's product with other indicators in it: the alternatives that the paper rejects (LMetric, section 5.1)."""

from typing import ClassVar

import numpy as np

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import kv_hit, p_token, total_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class HitRatioTimesBatch:
    """score = (1 - kv_hit) x BS (figure 18). It sees what is cached but not what waits to be prefilled.

    1 - kv_hit is taken as at least one token's share of the prompt, as P-token is taken as at least 1; the paper does
    not say.
    """

    name: ClassVar[str] = "hit_ratio_x_batch"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = "score = (1 - share of the prompt that is cached) x bs; bs = running + queued requests"
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        missed = np.maximum(1 - kv_hit(problem), 1 / max(problem.request.prompt_tokens, 1))
        bs = problem.snapshot.batch_requests
        scores = among_candidates(missed * bs, problem.candidates)
        turn = self._turns.next(problem.request.model)
        row = lowest(scores, turn, tie_break=missed)
        return Decision(row, scores, {"bs": bs, "cached_tokens": problem.cached_tokens})


class PTokenTimesTokens:
    """score = P-token x total tokens (figure 19). A few long contexts weigh as much as many short ones."""

    name: ClassVar[str] = "p_token_x_tokens"
    rule: ClassVar[str] = "score = p_token x tokens of the instance's requests; ties go to the lowest p_token"
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        tokens, load = p_token(problem), total_tokens(problem)
        scores = among_candidates(tokens * load, problem.candidates)
        turn = self._turns.next(problem.request.model)
        row = lowest(scores, turn, tie_break=tokens)
        return Decision(row, scores, {"p_token": tokens, "total_tokens": load, "cached_tokens": problem.cached_tokens})
