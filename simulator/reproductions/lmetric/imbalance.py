"""How unevenly prefill work falls on the instances (LMetric, section 4.3 and figure 27)."""

from collections.abc import Sequence

import numpy as np

from simulator.report.outcome import RequestOutcome

WINDOW_S = 10.0


def prefill_imbalance(outcomes: Sequence[RequestOutcome], instances: int) -> float:
    """Mean over windows of 10 s of the gap between the instances that prefilled most and least, in tokens.

    Tokens count in the window in which the request's first token came out; cached ones were not computed. The paper
    shows the time of prefill of two instances, whose difference this is for the two that differ most.
    """
    served = [outcome for outcome in outcomes if outcome.first_token_s is not None and not outcome.error]
    if not served:
        return 0.0
    windows = np.array([int((outcome.first_token_s or 0.0) // WINDOW_S) for outcome in served])
    names = {name: number for number, name in enumerate(sorted({outcome.instance_id for outcome in served}))}
    tokens = np.zeros((int(windows.max()) + 1, max(instances, len(names))))
    for window, outcome in zip(windows.tolist(), served, strict=True):
        tokens[window, names[outcome.instance_id]] += outcome.input_tokens - outcome.cached_tokens
    return float((tokens.max(axis=1) - tokens.min(axis=1)).mean())
