"""What was last seen of one cascade's workload, and whether it has moved (pure)."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
from controlplane.planning.cascade.falls import AnswerFalls
from controlplane.planning.cascade.sample import CascadeSample
from controlplane.planning.cascade.workload import write_workload


class WorkloadHistory:
    """The windows of the recent past: as many as must have moved for a new plan, which is then made for them."""

    def __init__(self, models: tuple[str, ...], settings: DriftSettings) -> None:
        self.models = models
        self.verdict = "no workload yet"
        self.workloads = 0
        self.plans = 0
        self._settings = settings
        self._windows: deque[CascadeSample] = deque(maxlen=settings.windows)
        self._detector: DriftDetector | None = None
        self._threshold = 0.0
        """Of the first tier, by the plan in force."""

    def seen(self, window: CascadeSample) -> str:
        """Why to plan now; empty: no need."""
        self.workloads += 1
        self._windows.append(window)
        if self._detector is not None:
            return self._detector.seen(summary_of(window, self._threshold))
        if window.requests < self._settings.min_requests:
            return ""
        return "it is the first workload"

    def workload(self) -> tuple[bytes, ...]:
        """The windows in lines, at the rate of the last."""
        windows = list(self._windows)
        merged = CascadeSample(
            scores=np.concatenate([window.scores for window in windows]),
            input_tokens=np.concatenate([window.input_tokens for window in windows]),
            output_tokens=np.concatenate([window.output_tokens for window in windows]),
            rate_per_s=windows[-1].rate_per_s,
            falls=_falls(windows),
        )
        return tuple(write_workload(self.models, merged))

    def planned(self, thresholds: Sequence[float]) -> None:
        """A plan for the workload, with these thresholds, is in force."""
        self.plans += 1
        self._threshold = thresholds[0] if thresholds else 0.0
        planned_for = summary_of(self._windows[-1], self._threshold)
        if self._detector is None:
            self._detector = DriftDetector(planned_for, self._settings)
        else:
            self._detector.replanned(planned_for)

    def refused(self) -> None:
        """No plan could be made: the old one stays."""
        if self._detector is not None:
            self._detector.refused()


def _falls(windows: Sequence[CascadeSample]) -> tuple[tuple[AnswerFalls, ...], ...] | None:
    """Of all requests; None where a window has none: then answers are taken to be written whole, which is safe."""
    merged: list[tuple[AnswerFalls, ...]] = []
    for window in windows:
        if window.falls is None:
            return None
        merged += window.falls
    return tuple(merged)


def summary_of(window: CascadeSample, threshold: float) -> WorkloadSummary:
    """What drift is measured by; `threshold` is the first tier's."""
    return WorkloadSummary(
        rate_per_s=window.rate_per_s,
        input_tokens=float(window.input_tokens.mean()),
        output_tokens=float(window.output_tokens[:, 0].mean()),
        score=float(window.scores[:, 0].mean()),
        requests=window.requests,
        written_tokens=None if window.falls is None else float(window.tokens(0, threshold).mean()),
    )
