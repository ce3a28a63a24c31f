"""When the workload has moved so far that the plan must be made anew (Cascadia, section 4.4)."""

import math
from dataclasses import dataclass

from mesh.errors import ConfigurationError

MIN_REQUESTS = 20
"""Fewer sampled requests say nothing of lengths and scores."""
CHANCE = 2.0
"""Rates that differ by less than so many standard deviations of what is counted may be the same."""


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """What a window of requests looked like; kept with the plan that was made for it."""

    rate_per_s: float
    requests: int
    """Number of sampled requests, over which the following means are taken."""
    input_tokens: float | None
    """None: no request was sampled."""
    output_tokens: tuple[float | None, ...]
    """Of each tier's whole answers, smallest first; None: the tier has not answered."""
    scores: tuple[float | None, ...]
    """Of each tier's answers, 0 to 100: the lower, the more complex the requests."""
    written_tokens: float | None = None
    """What the smallest tier writes of an answer until it gives it up, by the threshold in force; None: it gives none
    up, or has not answered."""
    seconds: float | None = None
    """All requests, sampled or not, were counted for so long; None: not known, so the rate is as good as the sample."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """How far a workload must differ from the planned one, and for how long, before the plan is made anew."""

    ratio: float = 1.3
    """Rates and lengths that differ by more than this factor, either way, have drifted."""
    score_points: float = 10.0
    """Scores that differ by more than this have drifted."""
    windows: int = 2
    """This many windows in a row must have drifted: one burst is no drift."""
    pause_windows: int = 2
    """After a new plan, so many windows are watched but not counted."""
    min_requests: int = MIN_REQUESTS
    """A window with fewer sampled requests says nothing of lengths and scores."""

    def __post_init__(self) -> None:
        if self.ratio <= 1 or self.score_points <= 0 or self.windows < 1 or self.pause_windows < 0:
            raise ConfigurationError(
                f"drift needs ratio > 1, score_points > 0, windows >= 1 and pause_windows >= 0, got {self}"
            )


def drift(planned_for: WorkloadSummary, now: WorkloadSummary, settings: DriftSettings) -> str:
    """What differs between two workloads, in words; empty if nothing differs by enough.

    The rate is judged by all requests that came, however few were sampled. Lengths and scores need a sample of at least
    `min_requests`; those of a tier are taken from the smallest tier that has answered both times.
    """
    return _rate_moved(planned_for, now, settings) or _content_moved(planned_for, now, settings)


def _rate_moved(planned_for: WorkloadSummary, now: WorkloadSummary, settings: DriftSettings) -> str:
    before, after = planned_for.rate_per_s, now.rate_per_s
    if not _differ(before, after, settings.ratio):
        return ""
    if now.seconds is None:
        if now.requests < settings.min_requests:
            return ""
    elif _may_be_chance(before, planned_for.seconds, after, now.seconds):
        return ""
    return f"the request rate went from {before:.4g} to {after:.4g}"


def _may_be_chance(before: float, before_seconds: float | None, after: float, seconds: float) -> bool:
    """Arrivals scatter: of 10 expected in a window 14 may come. Poisson counts, made alike by Anscombe's square root,
    whose standard deviation is 1/2."""
    roots = math.sqrt(after * seconds + 3 / 8) - math.sqrt(before * seconds + 3 / 8)
    deviation = 0.5 * math.sqrt(1.0 + (seconds / before_seconds if before_seconds else 0.0))
    return abs(roots) < CHANCE * deviation


def _content_moved(planned_for: WorkloadSummary, now: WorkloadSummary, settings: DriftSettings) -> str:
    if now.requests < settings.min_requests or planned_for.input_tokens is None or now.input_tokens is None:
        return ""
    compared = [("the mean prompt", planned_for.input_tokens, now.input_tokens)]
    tier = _smallest_compared_tier(planned_for, now)
    if tier is not None:
        compared.append(("the mean answer", *tier.output_tokens))
    if planned_for.written_tokens is not None and now.written_tokens is not None:
        # The smallest tier's load is what it writes; whole answers tell how long those of the tiers above are.
        compared.append(("what is written of an answer", planned_for.written_tokens, now.written_tokens))
    for name, before, after in compared:
        if _differ(before, after, settings.ratio):
            return f"{name} went from {before:.4g} to {after:.4g}"
    if tier is not None and abs(tier.scores[0] - tier.scores[1]) > settings.score_points:
        which = "the smallest tier" if tier.number == 0 else f"tier {tier.number + 1}"
        return f"{which}'s mean score went from {tier.scores[0]:.0f} to {tier.scores[1]:.0f}"
    return ""


@dataclass(frozen=True, slots=True)
class _ComparedTier:
    """A tier that has answered both times; (before, after)."""

    number: int
    output_tokens: tuple[float, float]
    scores: tuple[float, float]


def _smallest_compared_tier(planned_for: WorkloadSummary, now: WorkloadSummary) -> _ComparedTier | None:
    both = zip(planned_for.output_tokens, now.output_tokens, planned_for.scores, now.scores, strict=False)
    for number, (tokens_before, tokens_after, score_before, score_after) in enumerate(both):
        if tokens_before is None or tokens_after is None or score_before is None or score_after is None:
            continue
        return _ComparedTier(number, (tokens_before, tokens_after), (score_before, score_after))
    return None


def _differ(before: float, after: float, ratio: float) -> bool:
    low, high = sorted((before, after))
    return high > low * ratio


class DriftDetector:
    """Decides when to plan anew, and why: a workload must have drifted for several windows in a row."""

    def __init__(self, planned_for: WorkloadSummary, settings: DriftSettings, pauses: bool = True) -> None:
        """`pauses`: the plan for this workload is new."""
        self.planned_for = planned_for
        self.moved_windows = 0
        """Windows in a row that have drifted, up to the last one."""
        self.moved_now = ""
        """What has drifted in the last window, in words."""
        self.was_paused = False
        """The last window was watched and not compared: a decision was made just before."""
        self._settings = settings
        self._pause = settings.pause_windows if pauses else 0
        self._is_by_rate = False

    def observe(self, window: WorkloadSummary) -> str:
        """Compare a window with the workload planned for. Returns why to plan anew now; empty for no reason yet."""
        is_small = window.requests < self._settings.min_requests
        self.moved_now, self.was_paused = "", bool(self._pause)
        if is_small and window.seconds is None:
            return ""
        if self._pause:
            self._pause -= 1
            return ""
        rate = _rate_moved(self.planned_for, window, self._settings)
        self.moved_now = why = rate or _content_moved(self.planned_for, window, self._settings)
        if why:
            self.moved_windows += 1
            self._is_by_rate = bool(rate)
        elif not is_small or self._is_by_rate:  # a small one does not tell that lengths and scores are back
            self.moved_windows = 0
        return why if self.moved_windows >= self._settings.windows else ""

    def on_new_plan(self, planned_for: WorkloadSummary) -> None:
        """A plan for this workload is in force: compare with it from now on, after a pause."""
        self.planned_for = planned_for
        self._wait()

    def on_plan_refused(self) -> None:
        """No new plan could be made: keep the old one, and wait as after a new one before asking again."""
        self._wait()

    def _wait(self) -> None:
        self.moved_windows = 0
        self._pause = self._settings.pause_windows
