"""How much slower a machine is by the clock than by the step.

Samples taken for a fixed time hold few steps of a moment in which the machine was slow: a mean over steps hides such
moments. Requests that arrive by the clock meet them in proportion to their length. On a machine of even pace both are
the same.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from controlplane.model.step_sample import StepSample
from controlplane.planning.instance_profile import StepCoefficients
from simulator.cost.fitted.step_fit import step_features

WORK_MS = 500.0
"""Of a request, as predicted: about what the requests of a clip are."""
_STARTS_EVERY_MS = 20.0


def wall_clock_slowdown(runs: Iterable[Sequence[StepSample]], coefficients: StepCoefficients) -> float:
    """How long `WORK_MS` of predicted steps take from a moment that is drawn by the clock, over `WORK_MS`; at least 1.

    Each run's steps are in their order; runs are taken as if one followed the other at once.
    """
    samples = [step for steps in runs for step in steps]
    if not samples:
        return 1.0
    weights = np.array([getattr(coefficients, name) for name in StepCoefficients.__struct_fields__])
    time_ms = np.concatenate(([0.0], np.cumsum([step.duration_ms for step in samples])))
    work_ms = np.concatenate(([0.0], np.cumsum(np.maximum(step_features(samples) @ weights, 1e-6))))
    last_start_ms = float(np.interp(work_ms[-1] - WORK_MS, work_ms, time_ms))
    if work_ms[-1] <= WORK_MS or last_start_ms <= _STARTS_EVERY_MS:
        return max(1.0, float(time_ms[-1] / work_ms[-1]))
    starts_ms = np.arange(0.0, last_start_ms, _STARTS_EVERY_MS)
    ends_ms = np.interp(np.interp(starts_ms, time_ms, work_ms) + WORK_MS, work_ms, time_ms)
    return max(1.0, float(np.mean(ends_ms - starts_ms)) / WORK_MS)
