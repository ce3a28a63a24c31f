"""Where a request is decoded whose prompt has been computed: where that costs everybody the least time (STAR, section
3, dispatches by predicted length). Pure."""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from controlplane.model.placement import Decision, DecodeChoice, PlacementProblem
from controlplane.policies import phases
from controlplane.policies.interface import Policy
from controlplane.policies.parameters import PolicyParameters
from controlplane.policies.rescheduling.problem import DecodeInstance
from controlplane.policies.rescheduling.trajectory_planner import TrajectoryPlanner
from controlplane.policies.selection import among_candidates, lowest

RULE: Final = "score = ms that it costs all requests there, itself included, until the last predicted end"


class DecodesByWorth:
    """Implements `Policy` and `LateDecider`: another policy, in a fleet whose instances are set aside for phases, that
    leaves open who decodes a request until its prompt is computed. Where nothing is known of what runs, `phases`
    decides."""

    def __init__(
        self, inner: Policy, running: Callable[[], tuple[DecodeInstance, ...]], planner: TrajectoryPlanner
    ) -> None:
        """`running` tells of the instances whose requests are known at this moment."""
        self.name, self.rule = inner.name, inner.rule
        self._inner = inner
        self._running = running
        self._planner = planner

    @property
    def parameters(self) -> PolicyParameters:
        """Those of the policy that places."""
        return self._inner.parameters

    def decide(self, problem: PlacementProblem) -> Decision:
        decision = self._inner.decide(problem)
        return msgspec.structs.replace(decision, stays=False) if problem.snapshot.is_restricted else decision

    def decide_decode(self, problem: PlacementProblem, prefill_row: int) -> DecodeChoice:
        snapshot, candidates = problem.snapshot, problem.decode_candidates
        rows = {snapshot.row(each.instance_id): each for each in self._running()}
        known = [row for row in rows if row is not None and candidates is not None and candidates[row]]
        if not known:
            stays = Decision(prefill_row, np.zeros(len(snapshot)))
            return phases.choose_decode(problem, stays) or DecodeChoice(prefill_row, phases.STAYS)
        coming = np.asarray(snapshot.unreported_decodes, dtype=np.float64)[known]
        costs_ms = self._planner.joining_ms([rows[row] for row in known], problem.request.prompt_tokens, coming)
        scores = np.full(len(snapshot), np.inf)
        scores[known] = costs_ms
        return DecodeChoice(lowest(among_candidates(scores, np.isfinite(scores)), prefill_row), RULE, scores)
