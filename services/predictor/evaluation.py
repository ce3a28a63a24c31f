"""How wrong predictions are: by split, against baselines, and as more tokens are generated (STAR, figure 7)."""

from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.prediction.length_baselines import Constant, GeneratedOnly, LengthBaseline, PromptOnly
from controlplane.prediction.length_features import Inputs, features
from controlplane.prediction.length_samples import LengthSamples, Split
from services.predictor.network import Network

FEWEST_IN_POINT: Final = 30
"""Samples below which a point of a curve would say nothing."""
MOST_POINTS: Final = 25
LONG_BAND: Final = (0.85, 0.975)
"""Quantiles of the lengths between which the requests lie that are followed from their beginning."""


class CurvePoint(msgspec.Struct, frozen=True):
    """The error of one method on samples that had generated between two numbers of tokens."""

    from_generated_tokens: int
    to_generated_tokens: int
    samples: int
    mae_tokens: float


class EvaluationReport(msgspec.Struct, frozen=True):
    """All figures are of held-out requests (test split) unless they say otherwise; errors in tokens."""

    model: str
    artefact: str
    inputs: str
    parameters: int
    source: str
    temperature: float
    every_tokens: int
    requests: dict[Split, int]
    samples: dict[str, int]
    cut_requests: int
    """Of all splits: ended at the limit of their length."""
    mean_output_tokens: float
    mean_remaining_tokens: float
    mae_tokens: dict[str, float]
    """By method: the predictor, its ablations, the baselines."""
    mae_tokens_uncut: dict[str, float]
    """The same over the held-out requests that ended by themselves."""
    best_baseline: str
    change_percent: float
    """Of the predictor's error against the best baseline's; STAR reports -49.42 against the best auxiliary model."""
    mae_tokens_by_split: dict[str, float]
    curves: dict[str, list[CurvePoint]]
    """By method, over the tokens generated so far. `long:` before a name: long requests of about one length, as far as
    all of them got, so that every point is of the same requests."""
    long_tokens: tuple[int, int]
    """Shortest and longest of these."""


class LengthPrediction:
    """The trained predictor as a `LengthBaseline`, to be compared with simpler ones."""

    def __init__(self, network: Network, inputs: Inputs) -> None:
        self._network = network
        self._inputs = inputs

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        rows = features(self._inputs, samples.states, samples.prompt_tokens, samples.generated_tokens)
        return self._network.remaining_tokens(rows).astype(np.float64)


class PredictedOnce:
    """The predictor asked at the end of the prompt alone; what has been generated since is taken off. Shows what
    predicting continuously is worth."""

    def __init__(self, prediction: LengthPrediction) -> None:
        self._prediction = prediction

    def predict(self, samples: LengthSamples) -> NDArray[np.float64]:
        """See `LengthBaseline`; samples of one request begin with that of its prompt."""
        _, first, row_of_sample = np.unique(samples.requests, return_index=True, return_inverse=True)
        at_prompt = np.zeros(len(samples), dtype=np.bool_)
        at_prompt[first] = True
        once = samples.only(at_prompt)
        order = np.argsort(once.requests, kind="stable")
        totals = (self._prediction.predict(once) + once.generated_tokens)[order]
        return np.maximum(1.0, totals[row_of_sample] - samples.generated_tokens)


def fit_baselines(train: LengthSamples) -> dict[str, LengthBaseline]:
    """The three baselines that need no model, by name."""
    return {"constant": Constant(train), "prompt_only": PromptOnly(train), "generated_only": GeneratedOnly(train)}


def mae_tokens(method: LengthBaseline, samples: LengthSamples) -> float:
    """Mean absolute error of the predicted remaining length, in tokens."""
    return float(np.abs(method.predict(samples) - samples.remaining_tokens).mean())


def compare(methods: Mapping[str, LengthBaseline], samples: LengthSamples) -> dict[str, float]:
    """Mean absolute error of each method on the same samples, in tokens."""
    return {name: mae_tokens(method, samples) for name, method in methods.items()}


def curves(methods: Mapping[str, LengthBaseline], samples: LengthSamples) -> dict[str, list[CurvePoint]]:
    """The error of each over the tokens generated so far, for all requests and for the long ones (see `LONG_BAND`)."""
    shortest, longest_tokens = long_band(samples)
    totals = samples.generated_tokens + samples.remaining_tokens
    is_long = (totals >= shortest) & (totals <= longest_tokens) & (samples.generated_tokens < shortest)
    longest = samples.only(is_long)
    drawn = {name: _curve(method, samples) for name, method in methods.items()}
    return drawn | {f"long:{name}": _curve(method, longest) for name, method in methods.items()}


def long_band(samples: LengthSamples) -> tuple[int, int]:
    """Tokens of the shortest and the longest of the long requests."""
    totals = samples.generated_tokens + samples.remaining_tokens
    _, first = np.unique(samples.requests, return_index=True)
    shortest, longest = np.quantile(totals[first], LONG_BAND)
    return int(shortest), int(longest)


def _curve(method: LengthBaseline, samples: LengthSamples) -> list[CurvePoint]:
    errors = np.abs(method.predict(samples) - samples.remaining_tokens)
    generated = samples.generated_tokens
    size = max(FEWEST_IN_POINT, len(samples) // MOST_POINTS)
    order = np.argsort(generated, kind="stable")
    points: list[CurvePoint] = []
    start = 0
    while len(order) - start >= FEWEST_IN_POINT:
        end = min(len(order), start + size)
        # Samples of one number of generated tokens belong into one point.
        while end < len(order) and generated[order[end]] == generated[order[end - 1]]:
            end += 1
        rows = order[start:end]
        points.append(
            CurvePoint(int(generated[rows[0]]), int(generated[rows[-1]]), len(rows), float(errors[rows].mean()))
        )
        start = end
    return points


def split_errors(method: LengthBaseline, splits: Mapping[Split, LengthSamples]) -> dict[str, float]:
    """Mean absolute error on each split, in tokens."""
    return {name: mae_tokens(method, samples) for name, samples in splits.items()}
