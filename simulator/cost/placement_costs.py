"""A modelled instance's step costs in the terms of placement, fitted as a profile's are."""

import numpy as np

from controlplane.model.step_costs import StepCosts
from controlplane.prediction.least_squares import non_negative_least_squares
from simulator.cost.model import BatchShape, CostModel, PrefillChunk


def fitted_costs(cost: CostModel) -> StepCosts:
    """Fitted to 400 batches of up to 64 decodes, of contexts up to 20,000 tokens, most of them with a prompt's chunk;
    relative errors count."""
    rng = np.random.default_rng(0)
    rows, durations_ms = [], []
    for _ in range(400):
        decodes = int(rng.integers(0, 65))
        contexts = np.sort(rng.integers(200, 20_000, decodes))
        new, before = (int(rng.integers(1, 2048)), int(rng.integers(0, 20_000))) if rng.random() < 0.6 else (0, 0)
        if not decodes and not new:
            continue
        prefill = (PrefillChunk(new, before),) if new else ()
        durations_ms.append(cost.step_ms(BatchShape(prefill, contexts, int(contexts.sum()))))
        rows.append((1.0, new, decodes, float(contexts.sum()), new * (before + (new + 1) / 2)))
    features, targets = np.array(rows), np.array(durations_ms)
    fitted = non_negative_least_squares(features / targets[:, None], np.ones(len(targets)))
    return StepCosts(*fitted.tolist())
