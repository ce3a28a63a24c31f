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

WINDOW_MS = 500.0
"""About as long as a request: what it meets is the pace over its life."""


def pace_by_the_clock(runs: Iterable[Sequence[StepSample]], coefficients: StepCoefficients) -> float:
    """Mean of measured over foretold duration, over time; at least 1. Each run's steps are in their order."""
    weights = np.array([getattr(coefficients, name) for name in StepCoefficients.__struct_fields__])
    measured_ms: list[float] = []
    foretold_ms: list[float] = []
    for steps in runs:
        if not steps:
            continue
        durations = np.array([step.duration_ms for step in steps])
        foretold = step_features(steps) @ weights
        window = ((np.cumsum(durations) - durations) // WINDOW_MS).astype(int)
        starts = np.flatnonzero(np.diff(window, prepend=-1))
        measured_ms += np.add.reduceat(durations, starts).tolist()
        foretold_ms += np.add.reduceat(foretold, starts).tolist()
    if not sum(foretold_ms):
        return 1.0
    measured, foretold = np.array(measured_ms), np.array(foretold_ms)
    by_the_clock = float(np.average(measured / np.maximum(foretold, 1e-9), weights=measured))
    return max(1.0, by_the_clock)
