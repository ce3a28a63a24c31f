"""What a plan is made for: a workload in which tiers without instances are stood in for, or left out (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from controlplane.model.cascade_goal import CascadeGoal, judgement_s
from controlplane.planning.cascade.drift import WorkloadSummary
from controlplane.planning.cascade.imputation import impute_tier
from controlplane.planning.cascade.observed import ObservedWindow, summary_of
from controlplane.planning.cascade.workload import WorkloadRequest, WorkloadWindow, write_window
from mesh.errors import ConfigurationError, PlanInfeasible


@dataclass(frozen=True, slots=True)
class SeenBefore:
    """What a tier has answered in the last windows in which it was there."""

    model: str
    requests: tuple[WorkloadRequest, ...]
    """Each with an answer of this tier; empty: it was never there."""
    windows_ago: int
    """0: in the last window."""
    has_no_gpus: bool
    """By the plan in force."""


@dataclass(frozen=True, slots=True)
class PlanCase:
    """What a plan is to be made for."""

    models: tuple[str, ...]
    """Of the cascade."""
    planned: tuple[int, ...]
    """Those of them that are planned for; the others were never seen."""
    window: ObservedWindow
    """With an answer of every planned tier to every request."""
    notes: tuple[str, ...]
    """Whose answers are how old, in words."""
    judge: str = ""
    """Whose scores these are."""
    label: str = ""
    """Who labelled the answers."""

    def lines(self) -> tuple[bytes, ...]:
        """The workload of the planned tiers."""
        models = tuple(self.models[tier] for tier in self.planned)
        requests = tuple(_only(request, self.planned) for request in self.window.requests)
        window = WorkloadWindow(models, self.window.rate_per_s, requests, self.judge, self.label)
        return tuple(write_window(window))

    def goal(self, goal: CascadeGoal, judge: str) -> CascadeGoal:
        """For the planned tiers and this judge. Raises `ConfigurationError` for a goal with more or fewer tiers than
        the cascade: that may have changed since."""
        if len(goal.tiers) != len(self.models):
            raise ConfigurationError(
                f"the goal names {len(goal.tiers)} tiers, the cascade has {len(self.models)} "
                f"({', '.join(self.models)}): set a goal with one for each (penstock plan goal)"
            )
        return msgspec.structs.replace(
            goal,
            tiers=tuple(goal.tiers[tier] for tier in self.planned),
            judge_s=judgement_s(judge) if goal.judge_s is None else goal.judge_s,
        )

    def summary(self, threshold: float) -> WorkloadSummary:
        """What the plan is for, by the first tier's threshold."""
        return summary_of(self.window, len(self.models), threshold)


def plan_case(window: ObservedWindow, tiers: Sequence[SeenBefore]) -> PlanCase:
    """The window, made complete.

    A tier that was never seen cannot be planned. Where the plan in force gives it no GPUs, planning goes on without it;
    where it counts on the tier, or where there is no plan, the tier is only not there now, and a plan that drops it for
    that would keep it from ever being seen. Raises `PlanInfeasible` then.
    """
    requests, planned, notes = window.requests, [], []
    for number, tier in enumerate(tiers):
        lacking = sum(request.scores[number] is None for request in requests)
        if lacking and not tier.requests:
            if not tier.has_no_gpus:
                raise PlanInfeasible(
                    f"{tier.model} has answered too few samples since this planner started, so that nobody knows what "
                    "it would answer: see that an instance of it runs (penstock status)"
                )
            notes.append(f"{tier.model} has no GPUs and was never seen, so it is left out")
            continue
        if lacking:
            requests = impute_tier(requests, number, tier.requests)
            notes.append(_note(tier, lacking, len(requests)))
        planned.append(number)
    if not planned:
        raise PlanInfeasible("no tier has answered enough samples")
    complete = replace(window, requests=_with_score_bounds_of_all(requests))
    return PlanCase(tuple(tier.model for tier in tiers), tuple(planned), complete, tuple(notes))


def _with_score_bounds_of_all(requests: tuple[WorkloadRequest, ...]) -> tuple[WorkloadRequest, ...]:
    """Or of none: then answers are taken to be written whole, which is safe."""
    if all(request.score_bounds is not None for request in requests):
        return requests
    return tuple(msgspec.structs.replace(request, score_bounds=None) for request in requests)


def _note(tier: SeenBefore, lacking: int, requests: int) -> str:
    missing = f"{tier.model} has not answered {lacking} of {requests} samples"
    if not tier.windows_ago:
        return f"{missing}: its answers to the most alike ones stand in"
    return f"{missing}: its answers of {tier.windows_ago} windows ago stand in"


def _only(request: WorkloadRequest, tiers: Sequence[int]) -> WorkloadRequest:
    return msgspec.structs.replace(
        request,
        output_tokens=tuple(request.output_tokens[tier] for tier in tiers),
        scores=tuple(request.scores[tier] for tier in tiers),
        quality=None if request.quality is None else tuple(request.quality[tier] for tier in tiers),
        score_bounds=None if request.score_bounds is None else tuple(request.score_bounds[tier] for tier in tiers),
    )
