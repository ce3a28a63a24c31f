"""vLLM's own policy between data-parallel engines."""

from typing import ClassVar

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.selection import RoundRobinCounter, among_candidates, lowest

QUEUED_WEIGHT = 4


class LeastLoaded:
    """score = 4 x queued + running requests (LMetric, figure 6a; vLLM v1's data-parallel load balancer).

    Requests placed but not yet reported count as queued, as in vLLM, which adds them to its waiting count.
    """

    name: ClassVar[str] = "least_loaded"
    ignores_progress: ClassVar[bool] = True
    rule: ClassVar[str] = "score = 4 x queued requests + running requests"
    parameters = PolicyParameters()

    def __init__(self) -> None:
        self._turns = RoundRobinCounter()

    def decide(self, problem: PlacementProblem) -> Decision:
        running = problem.snapshot.running_requests
        queued = problem.snapshot.batch_requests - running
        scores = among_candidates(QUEUED_WEIGHT * queued + running, problem.candidates)
        turn = self._turns.next(problem.request.model)
        return Decision(lowest(scores, turn), scores, {"queued_requests": queued, "running_requests": running})
