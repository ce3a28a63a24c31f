"""Cache first while the load is even, load alone while it is not."""

from typing import Annotated, ClassVar

import msgspec

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.indicators import uncached_tokens
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class FilterParameters(PolicyParameters, frozen=True):
    """The largest spread of batch sizes that still counts as even. The paper tries 2 to 16; the best depends on
    the trace (LMetric, section 4.5)."""

    range_requests: Annotated[int, msgspec.Meta(ge=0)] = msgspec.field(default=8, name="range")


class Filter:
    """If the batch sizes differ by more than `range`, the smallest; else the most cached tokens, among equals the
    smallest batch (LMetric, figure 13: simplified from AIBrix's prefix-cache policy)."""

    name: ClassVar[str] = "filter"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = (
        "score = bs if the candidates' bs differ by more than range, else uncached prompt tokens, ties going to the "
        "lowest bs; bs = running + queued requests"
    )

    def __init__(self, parameters: FilterParameters) -> None:
        self.parameters = parameters
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        bs = problem.snapshot.batch_requests
        sizes = bs[problem.candidates]
        uneven = int(sizes.max() - sizes.min()) > self.parameters.range_requests
        scores = among_candidates(bs if uneven else uncached_tokens(problem), problem.candidates)
        turn = self._turns.next(problem.request.model)
        row = lowest(scores, turn, tie_break=bs)
        return Decision(row, scores, {"bs": bs, "cached_tokens": problem.cached_tokens})
