"""Artefacts and datasets that tests make for themselves."""

from pathlib import Path

import numpy as np

from controlplane.prediction.length_features import Inputs, input_width
from services.predictor.artefact import FORMAT, ArtefactMetadata, TrainingRecord, save_artefact
from services.predictor.dataset import CollectedRequest, DatasetDescription, DatasetFolder
from services.predictor.network import Network

HIDDEN_SIZE = 8
FINGERPRINT = "0123456789abcdef"

RECORD = TrainingRecord(
    source="made up",
    every_tokens=5,
    temperature=1.0,
    max_tokens=100,
    requests={"train": 70, "validation": 15, "test": 15},
    samples={"train": 700, "validation": 150, "test": 150},
    seed=0,
    learning_rate=1e-3,
    batch_samples=32,
    patience_epochs=3,
    epochs=5,
    best_epoch=4,
    seconds=1.0,
)


def make_network(seed: int = 0, inputs: Inputs = "state") -> Network:
    """Random layers."""
    draw = np.random.default_rng(seed)
    widths = (input_width(inputs, HIDDEN_SIZE), 16, 8, 4, 1)
    pairs = list(zip(widths[1:], widths[:-1], strict=True))
    return Network(
        tuple(draw.normal(size=shape).astype(np.float32) for shape in pairs),
        tuple(draw.normal(size=shape[0]).astype(np.float32) + 3 for shape in pairs),
    )


def make_artefact(
    folder: Path, *, seed: int = 0, model: str = "m", fingerprint: str = FINGERPRINT, inputs: Inputs = "state"
) -> ArtefactMetadata:
    """Written to `folder`."""
    network = make_network(seed, inputs)
    metadata = ArtefactMetadata(
        format=FORMAT,
        version="",
        model=model,
        model_fingerprint=fingerprint,
        hidden_size=HIDDEN_SIZE,
        inputs=inputs,
        sizes=tuple(weight.shape[0] for weight in network.weights),
        weights_file="",
        weights_sha256="",
        mae_tokens={"train": 1.0, "validation": 2.0, "test": 3.0},
        baseline_mae_tokens={"constant": 9.0},
        training=RECORD,
    )
    return save_artefact(folder, metadata, network)


DESCRIPTION = DatasetDescription(
    model="m",
    model_fingerprint=FINGERPRINT,
    hidden_size=HIDDEN_SIZE,
    every_tokens=5,
    source="made up",
    seed=0,
    temperature=1.0,
    max_tokens=100,
    dtype="float32",
    part_requests=50,
)


def make_dataset(folder: Path, requests: int = 200, seed: int = 0) -> DatasetFolder:
    """Requests whose first state entry tells the remaining length, with noise, and whose prompts tell nothing."""
    draw = np.random.default_rng(seed)
    dataset = DatasetFolder(folder)
    dataset.open(DESCRIPTION)
    part: list[CollectedRequest] = []
    for number in range(requests):
        output_tokens = int(draw.integers(1, 100))
        generated = tuple(range(0, output_tokens, DESCRIPTION.every_tokens))
        states = draw.normal(size=(len(generated), HIDDEN_SIZE)).astype(np.float32)
        states[:, 0] += [(output_tokens - count) / 10 for count in generated]
        prompt = tuple(int(token) for token in draw.integers(0, 50, size=int(draw.integers(1, 30))))
        answer = tuple(range(output_tokens))
        part.append(CollectedRequest(prompt, answer, output_tokens == 99, generated, states))
        if len(part) == DESCRIPTION.part_requests:
            dataset.write_part(number // DESCRIPTION.part_requests, part)
            part = []
    return dataset
