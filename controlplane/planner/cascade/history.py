"""What was last seen of one cascade's workload, and whether it has moved (pure)."""

from collections import deque

import numpy as np

from controlplane.planning.cascade.drift import DriftDetector, DriftSettings, WorkloadSummary
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

    def seen(self, window: CascadeSample) -> str:
        """Why to plan now; empty: no need."""
        self.workloads += 1
        self._windows.append(window)
        if self._detector is not None:
            return self._detector.seen(summary_of(window))
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
        )
        return tuple(write_workload(self.models, merged))

    def planned(self) -> None:
        """A plan for the workload is in force."""
        self.plans += 1
        planned_for = summary_of(self._windows[-1])
        if self._detector is None:
            self._detector = DriftDetector(planned_for, self._settings)
        else:
            self._detector.replanned(planned_for)

    def refused(self) -> None:
        """No plan could be made: the old one stays."""
        if self._detector is not None:
            self._detector.refused()


def summary_of(window: CascadeSample) -> WorkloadSummary:
    """What drift is measured by."""
    return WorkloadSummary(
        rate_per_s=window.rate_per_s,
        input_tokens=float(window.input_tokens.mean()),
        output_tokens=float(window.output_tokens[:, 0].mean()),
        score=float(window.scores[:, 0].mean()),
        requests=window.requests,
    )
