"""Every policy of Penstock's own does what `penstock.testing` asks of one; and that asks enough."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from controlplane.model.placement import Decision, PlacementProblem
from controlplane.policies.interface import Policy
from controlplane.policies.least_loaded import LeastLoaded
from controlplane.policies.registry import OWN_POLICIES, create_policy
from controlplane.policies.round_robin import RoundRobin
from penstock.testing.policy import EVENTS, History, PolicyConformance, checked, watched_io


class TestOwnPolicies(PolicyConformance):
    @pytest.fixture(params=OWN_POLICIES)
    def create(self, request: pytest.FixtureRequest) -> Callable[[], Policy]:
        return partial(create_policy, request.param)


class Faulty(RoundRobin):
    """Breaks one promise."""

    fault: ClassVar[Callable[[PlacementProblem, Decision], Decision]]

    def decide(self, problem: PlacementProblem) -> Decision:
        return type(self).fault(problem, super().decide(problem))


def _first_row(problem: PlacementProblem, decision: Decision) -> Decision:
    return Decision(0, np.zeros(len(problem.snapshot)))


def _finite_scores(problem: PlacementProblem, decision: Decision) -> Decision:
    return Decision(decision.row, np.zeros(len(problem.snapshot)))


def _writes(problem: PlacementProblem, decision: Decision) -> Decision:
    problem.cached_tokens[:] = 1
    return decision


@pytest.mark.parametrize("fault", [_first_row, _finite_scores, _writes])
def test_a_policy_that_breaks_a_promise_is_found_out(fault: Any) -> None:
    broken = type("Broken", (Faulty,), {"fault": staticmethod(fault)})
    history = History(checked(broken()), seed=1)

    def run() -> None:
        for _ in range(EVENTS):
            history.happen()

    with pytest.raises((AssertionError, ValueError)):
        run()


def test_one_that_reads_a_file_is_found_out() -> None:
    class Reads(LeastLoaded):
        def decide(self, problem: PlacementProblem) -> Decision:
            Path(__file__).read_bytes()
            return super().decide(problem)

    history = History(Reads(), seed=1)
    with watched_io() as events:
        history.place()
    assert "open" in events
    with watched_io() as events:
        pass
    Path(__file__).read_bytes()
    assert events == []
