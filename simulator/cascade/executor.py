"""Requests on their way through a simulated cascade: carries out what the state machine of each one says.

The frontend's `CascadeExecutor` does the same in the live mesh, for one request. Here all requests that a tier has are
simulated together, tier by tier: nothing flows back, so a tier's arrivals are known when the one before it has been
simulated. No tier fails here, and every judgement takes the same time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.protocols.cascade.state_machine import (
    Accept,
    Answered,
    Begin,
    CascadeStateMachine,
    EndedEarly,
    Event,
    Generate,
    Judge,
    Judged,
    Report,
)
from controlplane.protocols.cascade.terms import CascadeTerms


class SimulatedExecutor:
    """Of all requests of one run. Take the tiers in ascending order: have `asked` answered, and tell `answered`."""

    def __init__(self, thresholds: Sequence[float], arrivals_s: NDArray[np.float64], judge_s: float) -> None:
        terms = CascadeTerms(tuple(thresholds), (0.0,) * (len(thresholds) + 1))
        self.ready_s = arrivals_s.copy()
        """When each request was sent to the tier that has it, or its answer was accepted."""
        self.accepted_by = np.full(len(arrivals_s), -1)
        """The tier whose answer each request got; -1 before."""
        self._judge_s = judge_s
        self._machines = [CascadeStateMachine(f"r{number}", terms) for number in range(len(arrivals_s))]
        self._asked: list[list[int]] = [[] for _ in range(terms.tiers)]
        """The requests that each tier is to answer."""
        for number, arrived_s in enumerate(arrivals_s.tolist()):
            self._handle(number, Begin(), arrived_s)

    def asked(self, tier: int) -> NDArray[np.intp]:
        """The requests that the tier is to answer, in the order in which they come to it."""
        requests = np.array(self._asked[tier], np.intp)
        return requests[np.argsort(self.ready_s[requests], kind="stable")]

    def answered(
        self,
        tier: int,
        requests: NDArray[np.intp],
        finished_s: NDArray[np.float64],
        scores: NDArray[np.float64],
        ended_early: NDArray[np.bool_],
    ) -> None:
        """The tier has answered them, at these times, or ended its answers early; a judge would give these scores."""
        answers = zip(requests.tolist(), finished_s.tolist(), scores.tolist(), ended_early.tolist(), strict=True)
        for number, now_s, score, is_early in answers:
            if is_early:
                self._handle(number, EndedEarly(tier, score), now_s)
            elif self._handle(number, Answered(tier), now_s):
                self._handle(number, Judged(tier, score), now_s + self._judge_s)

    def validate(self) -> None:
        """Raises `InvariantBroken` where what is kept of a request contradicts itself."""
        for machine in self._machines:
            machine.validate()

    def _handle(self, number: int, event: Event, now_s: float) -> bool:
        """Whether the answer is to be judged."""
        *reports, instruction = self._machines[number].handle(event, now_s)
        assert all(isinstance(report, Report) for report in reports), "nobody counts simulated requests"
        match instruction:
            case Judge():
                return True
            case Generate(tier):
                self._asked[tier].append(number)
            case Accept(tier):
                self.accepted_by[number] = tier
            case _:
                raise AssertionError(f"tiers do not fail here, but there came {instruction}")
        self.ready_s[number] = now_s
        return False
