"""The quality of experience that an instance gives a batch (CascadeInfer, section 4.1, equation 1); lower is better.

Each request of a batch has the same quality Q = D_0 F_0 + ... + D_4 F_4: its normalised latency, in ms per output
token. The features are F_0 = 1, F_1 = n (requests), F_2 = sum I (input tokens), F_3 = sum I^2 and F_4 = sum L (input
and output so far). The batch's quality is the sum over its requests, n x Q.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.least_squares import non_negative_least_squares
from mesh.errors import ConfigurationError

FEATURES = 5
MIN_SAMPLES = 10
"""Fewer say nothing about five coefficients."""

Coefficient = Annotated[float, msgspec.Meta(ge=0)]


class BatchLoad(msgspec.Struct, frozen=True):
    """F_1 to F_4 of one instance's batch; averages over a request's lifetime when fitted, hence floats."""

    requests: float
    input_tokens: float
    """Sum of the inputs' lengths."""
    input_tokens_squared: float
    """Sum of the squares of the inputs' lengths."""
    total_tokens: float
    """Sum of input and output so far."""


class QoeSample(msgspec.Struct, frozen=True):
    """One finished request of a profiling run."""

    load: BatchLoad
    """Of the batches that it ran in, on average over its lifetime, itself included."""
    normalised_latency_ms: float
    """From submission to the last token, over the output tokens."""


class QoeModel(msgspec.Struct, frozen=True):
    """D_0 to D_4, in ms per output token.

    None is negative: each stands for work, so more load can never improve the quality. Without that bound the nearly
    collinear features of a profile let two coefficients of opposite sign cancel, and a planner would exploit it.
    """

    base_ms: Coefficient
    """D_0: of a step, whatever is in it."""
    request_ms: Coefficient
    """D_1: per request in the batch."""
    input_token_ms: Coefficient
    """D_2: per input token, the linear part of prefill."""
    input_token_squared_ms: Coefficient
    """D_3: per squared input length, the attention in prefill."""
    total_token_ms: Coefficient
    """D_4: per token of context read in each step."""

    @property
    def coefficients(self) -> NDArray[np.float64]:
        """D_0 to D_4; shape (5,)."""
        return np.array(msgspec.structs.astuple(self), dtype=np.float64)

    def normalised_latency_ms(self, load: BatchLoad) -> float:
        """Q of each request in the batch, in ms per output token."""
        return float(self.coefficients @ features([load])[0])

    def batch_quality(self, loads: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """n x Q for F_1 to F_4 in the last axis of `loads`; shape `loads.shape[:-1]`. Lower is better."""
        d = self.coefficients
        quality: NDArray[np.float64] = loads[..., 0] * (d[0] + loads @ d[1:])
        return quality


class QoeFit(msgspec.Struct, frozen=True):
    """A model and how well it predicts requests that it was not fitted to."""

    model: QoeModel
    fitted_samples: int
    held_out_samples: int
    relative_error: float
    """Mean of |predicted - measured| / measured over the held-out samples (paper, section 6.5: 0.089)."""
    static_relative_error: float
    """The same for a predictor that always answers the mean of the fitted samples (paper: 0.64)."""


def features(loads: Sequence[BatchLoad]) -> NDArray[np.float64]:
    """F_0 (always 1) to F_4 of each load; shape (loads, 5)."""
    table = np.ones((len(loads), FEATURES))
    for row, load in enumerate(loads):
        table[row, 1:] = load.requests, load.input_tokens, load.input_tokens_squared, load.total_tokens
    return table


def fit_qoe(samples: Sequence[QoeSample], *, relative: bool = True) -> QoeModel:
    """D_0 to D_4 by least squares over the samples, none of them negative.

    What is squared is the error over the measured latency, as the fit is judged by it too; published is the error
    itself (`relative` off), which a few slow requests dominate. Raises `ConfigurationError` for fewer than 10 samples
    or a latency that is not positive.
    """
    table, measured_ms = _as_arrays(samples)
    if relative:
        table, measured_ms = table / measured_ms[:, None], np.ones_like(measured_ms)
    return QoeModel(*non_negative_least_squares(table, measured_ms).tolist())


def fit_and_validate(
    samples: Sequence[QoeSample],
    rng: np.random.Generator,
    *,
    held_out_share: float = 0.25,
    relative: bool = True,
) -> QoeFit:
    """Fit to a random part of the samples and report the error on the rest.

    Raises `ConfigurationError` as `fit_qoe` does, and for a share outside (0, 1).
    """
    if not 0 < held_out_share < 1:
        raise ConfigurationError(f"held_out_share must lie between 0 and 1, got {held_out_share}")
    order = rng.permutation(len(samples))
    held_out_count = max(1, round(len(samples) * held_out_share))
    held_out = [samples[i] for i in order[:held_out_count]]
    fitted = [samples[i] for i in order[held_out_count:]]
    model = fit_qoe(fitted, relative=relative)
    mean_ms = float(np.mean([sample.normalised_latency_ms for sample in fitted]))
    table, measured_ms = _as_arrays(held_out, at_least=1)
    return QoeFit(
        model=model,
        fitted_samples=len(fitted),
        held_out_samples=len(held_out),
        relative_error=_relative_error(table @ model.coefficients, measured_ms),
        static_relative_error=_relative_error(np.full_like(measured_ms, mean_ms), measured_ms),
    )


def relative_error(model: QoeModel, samples: Sequence[QoeSample]) -> float:
    """Mean of |predicted - measured| / measured."""
    table, measured_ms = _as_arrays(samples, at_least=1)
    return _relative_error(table @ model.coefficients, measured_ms)


def _relative_error(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float:
    return float(np.mean(np.abs(predicted - measured) / measured))


def _as_arrays(
    samples: Sequence[QoeSample], *, at_least: int = MIN_SAMPLES
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(samples) < at_least:
        raise ConfigurationError(
            f"{len(samples)} samples are too few for a QoE model, {at_least} are the least: profile more "
            "configurations, or for longer"
        )
    table = features([sample.load for sample in samples])
    measured_ms = np.array([sample.normalised_latency_ms for sample in samples])
    if not (np.isfinite(table).all() and np.isfinite(measured_ms).all() and (measured_ms > 0).all()):
        raise ConfigurationError("a sample's loads and latency must be finite and its latency more than 0")
    return table, measured_ms
