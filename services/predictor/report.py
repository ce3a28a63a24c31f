"""The report of an artefact on a dataset."""

from collections.abc import Mapping

import numpy as np

from controlplane.prediction.length_baselines import LengthBaseline
from services.predictor.artefact import Artefact
from services.predictor.dataset import Dataset
from services.predictor.evaluation import (
    EvaluationReport,
    LengthPrediction,
    PredictedOnce,
    compare,
    curves,
    fit_baselines,
    long_band,
    split_errors,
)

PREDICTOR = "predictor"


def evaluate(
    artefact: Artefact, dataset: Dataset, learned: Mapping[str, LengthBaseline] | None = None
) -> EvaluationReport:
    """Compare an artefact with the baselines, and with other `learned` methods if there are any, on held-out requests.
    The artefact must be of the dataset's model."""
    prediction = LengthPrediction(artefact.network, artefact.metadata.inputs)
    methods: dict[str, LengthBaseline] = {PREDICTOR: prediction, "predictor_once": PredictedOnce(prediction)}
    methods |= dict(learned or {})
    baselines = fit_baselines(dataset.splits["train"])
    methods |= baselines
    test = dataset.splits["test"]
    uncut = test.only(~np.isin(test.requests, list(dataset.cut_requests)))
    errors = compare(methods, test)
    best = min(baselines, key=lambda name: errors[name])
    description = dataset.description
    return EvaluationReport(
        model=description.model,
        artefact=artefact.name,
        inputs=artefact.metadata.inputs,
        parameters=artefact.network.parameters,
        source=description.source,
        temperature=description.temperature,
        every_tokens=description.every_tokens,
        requests=dict(dataset.requests),
        samples={name: len(samples) for name, samples in dataset.splits.items()},
        cut_requests=len(dataset.cut_requests),
        mean_output_tokens=dataset.mean_output_tokens,
        mean_remaining_tokens=float(np.mean(test.remaining_tokens)),
        mae_tokens=errors,
        best_baseline=best,
        mae_tokens_uncut=compare(methods, uncut),
        change_percent=100 * (errors[PREDICTOR] / errors[best] - 1),
        mae_tokens_by_split=split_errors(prediction, dataset.splits),
        curves=curves(methods, test),
        long_tokens=long_band(test),
    )
