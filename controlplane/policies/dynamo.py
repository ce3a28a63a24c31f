"""The linear combination of tokens to prefill and tokens held."""

from typing import Annotated, ClassVar

import msgspec

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import p_token, total_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class DynamoParameters(PolicyParameters, frozen=True):
    """1 weighs a token to prefill like a token held."""

    prefill_weight: Annotated[float, msgspec.Meta(ge=0)] = 1.0


class Dynamo:
    """score = prefill_weight x P-token + total tokens, lowest wins (LMetric, section 6: ai-Dynamo's indicators).

    The paper calls the sum regulated and gives no formula. Both terms are in tokens here, so they need no other
    scale than the weight. The request's own prompt, which would be added everywhere, is left out of total tokens.
    """

    name: ClassVar[str] = "dynamo"
    rule: ClassVar[str] = (
        "score = prefill_weight x p_token + total_tokens; p_token = queued prefill tokens + uncached prompt tokens; "
        "total_tokens = context of running requests + queued prefill tokens"
    )

    def __init__(self, parameters: DynamoParameters) -> None:
        self.parameters = parameters
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        prefill, total = p_token(problem), total_tokens(problem)
        scores = among_candidates(self.parameters.prefill_weight * prefill + total, problem.candidates)
        turn = self._turns.next(problem.request.model)
        indicators = {"p_token": prefill, "total_tokens": total, "cached_tokens": problem.cached_tokens}
        return Decision(lowest(scores, turn), scores, indicators)
