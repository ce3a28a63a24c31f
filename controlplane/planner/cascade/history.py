"""What was last seen of one cascade's workload, and whether it has moved (pure)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.planner.cascade.plan_case import PlanCase, SeenBefore, plan_case
from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
from controlplane.planning.cascade.observed import ObservedWindow, summary_of
from controlplane.planning.cascade.plan import CascadePlan
from controlplane.planning.cascade.quality_watch import AchievedQuality, PromiseState, QualityWatch
from controlplane.planning.cascade.workload import WorkloadRequest

LABELLED_WINDOWS = 24
"""So many windows with enough requests are kept where samples are labelled, until the workload moves: a promise needs
more labels than two windows have. Two hours of them, as they are by default."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one more window of the workload means for the plan in force."""

    why: str
    """To plan now; empty: no need, or no way."""
    says: str = ""
    """In words, where there is no reason to plan."""


class WorkloadHistory:
    """The windows of the recent past: as many as must have moved for a new plan, which is then made for them.

    Of one cascade with the same models and the same first judge: scores of different judges do not compare. Windows
    with few requests are no ground for lengths and scores; they count for the rate only.
    """

    def __init__(self, models: tuple[str, ...], judge: str, settings: DriftSettings, label: str = "") -> None:
        self.models = models
        self.judge = judge
        self.label = label
        """Who labels the samples; empty: nobody."""
        self.verdict = "no workload yet"
        self.workloads = 0
        self.plans = 0
        self.finding = Finding("", "no workload yet")
        """Of the last window."""
        self._settings = settings
        self._last: ObservedWindow | None = None
        self._windows: deque[tuple[WorkloadRequest, ...]] = deque(
            maxlen=max(LABELLED_WINDOWS, settings.windows) if label else settings.windows
        )
        """With enough requests to plan for."""
        self._seen: list[deque[tuple[int, tuple[WorkloadRequest, ...]]]] = [
            deque(maxlen=settings.windows) for _ in models
        ]
        """By tier: windows in which it has answered enough requests, by their numbers, with those requests."""
        self._plan: CascadePlan | None = None
        self._reason = ""
        self._detector: DriftDetector | None = None
        self._watch: QualityWatch | None = None
        self._since_plan = 0
        """Kept windows since the plan in force."""
        self._since_move: int | None = None
        """Kept windows of the workload since it moved; None: it has not, since the plan in force."""

    @property
    def quality(self) -> AchievedQuality | None:
        """What accepted answers are worth, beside what the plan in force promises; None where it promises nothing."""
        return None if self._watch is None else self._watch.achieved()

    def follow(self, plan: CascadePlan | None, reason: str) -> None:
        """This plan is in force; `reason`: why it does not count for the goal, empty if it does."""
        if plan == self._plan and reason == self._reason and (self._detector is None) == bool(reason):
            return
        is_other = plan != self._plan
        if is_other:
            self._watch = _watch_of(plan)
            self._since_plan, self._since_move = 0, None
        self._plan, self._reason = plan, reason
        self._detector = None
        if plan is not None and not reason:
            was_there_before = self.workloads == 0
            self._detector = DriftDetector(plan.workload or _rate_of(plan), self._settings, pauses=not was_there_before)
            if is_other:
                self.finding = Finding("", "another plan has come into force; the next workload is compared with it")

    def seen(self, window: ObservedWindow) -> Finding:
        """Take in another window and judge whether it is time to plan anew."""
        self.workloads += 1
        self._last = window
        requests = window.requests
        if len(requests) >= self._settings.min_requests:
            self._windows.append(requests)
            self._since_plan += 1
            self._since_move = None if self._since_move is None else self._since_move + 1
        for tier, before in enumerate(self._seen):
            answered = tuple(request for request in requests if request.scores[tier] is not None)
            if len(answered) >= self._settings.min_requests:
                before.append((self.workloads, answered))
        if self._watch is not None:
            self._watch.observe(requests)
        self.finding = self._first(window) if self._detector is None else self._compared(window, self._detector)
        if self._detector is not None and self.finding.why:
            self._forget(self._detector)
        return self.finding

    def _forget(self, detector: DriftDetector) -> None:
        """The windows before the workload moved; where nothing but the quality tells of that, those before the plan."""
        kept = self._since_plan
        if detector.moved_now:
            kept = self._since_move = self._since_move or self._settings.windows
        while len(self._windows) > max(kept, self._settings.windows):
            self._windows.popleft()

    def case(self) -> PlanCase:
        """What to plan for: the last windows with enough requests, at the rate of the last. Raises `PlanInfeasible`
        where a tier is unknown that the plan in force counts on."""
        assert self._last is not None, "planned for without a workload"
        deployed = {} if self._plan is None else {tier.model: tier.gpus for tier in self._plan.tiers}
        requests = tuple(request for window in self._windows for request in window)
        seen = [
            SeenBefore(
                model,
                tuple(request for _, answered in before for request in answered),
                self.workloads - before[-1][0] if before else 0,
                deployed.get(model) == 0,
            )
            for model, before in zip(self.models, self._seen, strict=True)
        ]
        case = plan_case(replace(self._last, requests=requests), seen)
        return replace(case, judge=self.judge, label=self.label)

    def planned(self, plan: CascadePlan) -> None:
        """This plan for the workload is in force."""
        self.plans += 1
        self.follow(plan, "")

    def refused(self) -> None:
        """No plan could be made: the old one stays."""
        if self._detector is not None:
            self._detector.on_plan_refused()

    def _first(self, window: ObservedWindow) -> Finding:
        """Of a workload that no plan stands for."""
        if not window.rate_per_s:
            return Finding("", "no requests came, so there is nothing to plan for")
        if len(window.requests) < self._settings.min_requests:
            return Finding("", f"too few requests to plan for ({self._counted(window)})")
        return Finding(self._reason or "it is the first workload")

    def _compared(self, window: ObservedWindow, detector: DriftDetector) -> Finding:
        """With what the plan in force is for."""
        is_small = len(window.requests) < self._settings.min_requests
        threshold = self._plan.thresholds[0] if self._plan is not None and self._plan.thresholds else 0.0
        summary = summary_of(window, len(self.models), threshold)
        if detector.planned_for.input_tokens is None and not is_small:
            # The plan does not say what it is for but for its rate: so it is for what comes first.
            planned_for = detector.planned_for
            detector.planned_for = replace(summary, rate_per_s=planned_for.rate_per_s, seconds=planned_for.seconds)
        why = detector.observe(summary) or self._broken(detector)
        if why and not window.rate_per_s:
            return Finding(
                "", f"no requests come any more: the plan for {detector.planned_for.rate_per_s:.4g} a second is kept"
            )
        if why and not self._windows:
            return Finding(
                "", f"{why}, but there are too few requests to plan for ({self._counted(window)}): the plan is kept"
            )
        return Finding(why, "" if why else self._unmoved(window, detector, is_small))

    def _broken(self, detector: DriftDetector) -> str:
        """Why to plan anew where rate, lengths and scores are as planned for and the answers are not; else empty."""
        quality = self.quality
        if quality is None or quality.state is not PromiseState.BROKEN or detector.was_paused:
            return ""
        return f"the quality is {quality.says()}"

    def _unmoved(self, window: ObservedWindow, detector: DriftDetector, is_small: bool) -> str:
        if detector.moved_now:
            windows = f"{detector.moved_windows} of {self._settings.windows} windows"
            return f"{detector.moved_now}, in {windows} that it takes to plan anew"
        if detector.was_paused:
            return "a plan was made or refused just before: the workload is watched, and compared later"
        if is_small:
            return f"the rate is as planned for; too few requests to compare more ({self._counted(window)})"
        return "the workload is as planned for"

    def _counted(self, window: ObservedWindow) -> str:
        came = "" if window.offered in (None, len(window.requests)) else f"; {window.offered} came"
        return f"{len(window.requests)} of {self._settings.min_requests}{came}"


def _watch_of(plan: CascadePlan | None) -> QualityWatch | None:
    if plan is None:
        return None
    if plan.promise is not None:
        return QualityWatch(plan.thresholds, plan.promise.quality, plan.promise.probability)
    return None if plan.quality_target is None else QualityWatch(plan.thresholds, plan.quality_target, 0.0)


def _rate_of(plan: CascadePlan) -> WorkloadSummary:
    """All that a plan says that does not say what it is for."""
    nothing: Sequence[None] = (None,) * len(plan.tiers)
    return WorkloadSummary(plan.rate_per_s, 0, None, tuple(nothing), tuple(nothing))
