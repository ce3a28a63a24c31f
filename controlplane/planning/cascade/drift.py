"""When the workload has moved so far that the plan must be made anew (Cascadia, section 4.4)."""

from dataclasses import dataclass

from mesh.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """What a window of requests looked like."""

    rate_per_s: float
    input_tokens: float
    """Mean."""
    output_tokens: float
    """Mean, of the smallest tier's whole answers."""
    score: float
    """Mean score of the smallest tier's answers, 0 to 100: the lower, the more complex the requests."""
    requests: int
    written_tokens: float | None = None
    """Mean, of what the smallest tier writes of an answer until it gives it up, by the threshold in force; None: it
    gives none up."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """How far is far."""

    ratio: float = 1.3
    """Rates and lengths that differ by more than this factor, either way, have moved."""
    score_points: float = 10.0
    """So have scores that differ by more than this."""
    windows: int = 2
    """So many windows in a row must have moved: one burst is none."""
    pause_windows: int = 2
    """After a new plan, so many windows are watched but not counted."""
    min_requests: int = 20
    """A window with fewer says nothing."""

    def __post_init__(self) -> None:
        if self.ratio <= 1 or self.score_points <= 0 or self.windows < 1 or self.pause_windows < 0:
            raise ConfigurationError(
                f"drift needs ratio > 1, score_points > 0, windows >= 1 and pause_windows >= 0, got {self}"
            )


def moved(planned_for: WorkloadSummary, now: WorkloadSummary, settings: DriftSettings) -> str:
    """What has moved, in words; empty if nothing has."""
    compared = [
        ("the request rate", planned_for.rate_per_s, now.rate_per_s),
        ("the mean prompt", planned_for.input_tokens, now.input_tokens),
        ("the mean answer", planned_for.output_tokens, now.output_tokens),
    ]
    if planned_for.written_tokens is not None and now.written_tokens is not None:
        # The smallest tier's load is what it writes; whole answers tell how long those of the tiers above are.
        compared.append(("what is written of an answer", planned_for.written_tokens, now.written_tokens))
    for name, before, after in compared:
        low, high = sorted((before, after))
        if high > low * settings.ratio:
            return f"{name} went from {before:.4g} to {after:.4g}"
    if abs(planned_for.score - now.score) > settings.score_points:
        return f"the smallest tier's mean score went from {planned_for.score:.0f} to {now.score:.0f}"
    return ""


class DriftDetector:
    """Says when to plan anew, and why; hysteresis included."""

    def __init__(self, planned_for: WorkloadSummary, settings: DriftSettings) -> None:
        self.planned_for = planned_for
        self._settings = settings
        self._moved_windows = 0
        self._pause = settings.pause_windows

    def seen(self, window: WorkloadSummary) -> str:
        """Why to plan anew now; empty: not yet, or nothing has moved."""
        if window.requests < self._settings.min_requests:
            return ""
        if self._pause:
            self._pause -= 1
            return ""
        why = moved(self.planned_for, window, self._settings)
        self._moved_windows = self._moved_windows + 1 if why else 0
        return why if self._moved_windows >= self._settings.windows else ""

    def replanned(self, planned_for: WorkloadSummary) -> None:
        """A plan for this workload is in force."""
        self.planned_for = planned_for
        self._moved_windows = 0
        self._pause = self._settings.pause_windows

    def refused(self) -> None:
        """No new plan could be made: keep the old one, and wait as after a new one before asking again."""
        self._moved_windows = 0
        self._pause = self._settings.pause_windows
