"""Fit the cost of a step to steps that were seen."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.model.step_sample import StepSample
from controlplane.planning.instance_profile import StepCoefficients, StepFit
from controlplane.prediction.least_squares import non_negative_least_squares
from mesh.errors import ConfigurationError

Matrix = NDArray[np.float64]

MIN_SAMPLES = 32
_REWEIGHTINGS = 3


def step_features(samples: Sequence[StepSample]) -> Matrix:
    """What each of `StepCoefficients`' fields is multiplied by, in their order; shape (samples, 7)."""
    return np.array(
        [
            (
                1.0,
                float(sample.prefill_tokens > 0),
                sample.prefill_tokens,
                sample.attended_pairs,
                sample.decode_requests,
                sample.context_tokens,
                sample.longest_context_tokens,
            )
            for sample in samples
        ],
        dtype=np.float64,
    )


def fit_steps(samples: Sequence[StepSample]) -> StepCoefficients:
    """Least squared relative errors, no coefficient negative.

    Errors are relative to the predicted duration, not to the measured one: a machine that is slow now and then would
    otherwise pull the fit below the mean. Raises `ConfigurationError` for too few samples or durations that are none.
    """
    if len(samples) < MIN_SAMPLES:
        raise ConfigurationError(f"{len(samples)} steps are too few to fit costs to: profile for longer")
    durations = np.array([sample.duration_ms for sample in samples])
    if not (np.isfinite(durations).all() and (durations > 0).all()):
        raise ConfigurationError("every step takes longer than 0 ms")
    features = step_features(samples)
    weights = 1 / durations
    solution = non_negative_least_squares(features * weights[:, None], np.ones(len(samples)))
    for _ in range(_REWEIGHTINGS):
        predicted = features @ solution
        weights = 1 / np.maximum(predicted, predicted.max() * 1e-6)
        solution = non_negative_least_squares(features * weights[:, None], durations * weights)
    return StepCoefficients(*solution.tolist())


def fit_and_validate_steps(
    samples: Sequence[StepSample], rng: np.random.Generator, held_out_share: float = 0.25
) -> StepFit:
    """Fit to a random part, report the error on the rest. Raises `ConfigurationError` as `fit_steps` does."""
    order = rng.permutation(len(samples))
    held_out = [samples[index] for index in order[: round(len(samples) * held_out_share)]]
    fitted = [samples[index] for index in order[len(held_out) :]]
    coefficients = fit_steps(fitted)
    predicted = step_features(held_out) @ _as_array(coefficients)
    measured = np.array([sample.duration_ms for sample in held_out])
    return StepFit(
        coefficients,
        len(fitted),
        len(held_out),
        relative_error=float(np.abs(predicted - measured).sum() / measured.sum()),
        total_error=float(predicted.sum() / measured.sum() - 1),
    )


def _as_array(coefficients: StepCoefficients) -> Matrix:
    return np.array([getattr(coefficients, name) for name in StepCoefficients.__struct_fields__], dtype=np.float64)
