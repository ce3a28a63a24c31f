"""Prefill and decode of a request on the same instance, placed by the same loads as Arrow's."""

from typing import ClassVar

import numpy as np

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.arrow.parameters import TtftParameters
from controlplane.policies.arrow.policy import own_prefill_ms
from controlplane.policies.arrow.prefill_queues import PrefillQueues
from controlplane.policies.indicators import uncached_tokens
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest


class Colocated:
    """The `Policy` without disaggregation: least predicted prefill delay, then fewest running tokens. A request is
    decoded where it is prefilled."""

    name: ClassVar[str] = "colocated"
    rule: ClassVar[str] = "least predicted prefill delay, then fewest running tokens; both phases there"

    def __init__(self, parameters: TtftParameters) -> None:
        self.parameters = parameters
        self._queues = PrefillQueues(parameters.curve)
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        turn = self._turns.next(problem.request.model)
        snapshot = problem.snapshot
        delay_ms = self._queues.delays_ms(snapshot)
        row = lowest(among_candidates(delay_ms, problem.candidates), turn, tie_break=snapshot.running_tokens)
        self._queues.add(problem, row, int(uncached_tokens(problem)[row]))
        indicators = {
            "prefill_delay_ms": np.rint(delay_ms).astype(np.int64),
            "running_tokens": snapshot.running_tokens,
        }
        scores = among_candidates(delay_ms + own_prefill_ms(problem, self.parameters.curve), problem.candidates)
        return Decision(row, scores, indicators)
