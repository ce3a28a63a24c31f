"""A trained predictor on disk: weights as safetensors, and a JSON file that says what they are good for."""

import hashlib
import os
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from controlplane.prediction.length_features import Inputs, input_width
from controlplane.prediction.length_samples import Split
from mesh.errors import ConfigurationError
from services.predictor.network import Network

FORMAT: Final = 1
METADATA_FILE: Final = "predictor.json"


class TrainingRecord(msgspec.Struct, frozen=True):
    """How the weights were trained: on which data, with which settings."""

    source: str
    """The prompts, for people."""
    every_tokens: int
    temperature: float
    max_tokens: int
    requests: dict[Split, int]
    samples: dict[str, int]
    seed: int
    learning_rate: float
    batch_samples: int
    patience_epochs: int
    epochs: int
    best_epoch: int
    seconds: float


class ArtefactMetadata(msgspec.Struct, frozen=True):
    """The content of predictor.json: which model the weights are for, their form, and how they were trained."""

    format: int
    version: str
    """Of the weights: the first 12 digits of their hash."""
    model: str
    model_fingerprint: str
    hidden_size: int
    inputs: Inputs
    sizes: tuple[int, ...]
    """Width of each layer from the first hidden one to the output."""
    weights_file: str
    weights_sha256: str
    mae_tokens: dict[str, float]
    """Mean absolute error by split."""
    baseline_mae_tokens: dict[str, float]
    """Mean absolute error of each baseline on the test split."""
    training: TrainingRecord


class Artefact:
    """A trained length predictor in memory, its weights checked against their hash."""

    def __init__(self, metadata: ArtefactMetadata, network: Network) -> None:
        self.metadata = metadata
        self.network = network

    @property
    def name(self) -> str:
        """Model and version, for logs and answers."""
        return f"{self.metadata.model}@{self.metadata.version}"

    def check_model(self, model: str, fingerprint: str, hidden_size: int) -> None:
        """Raises `ConfigurationError` unless it was trained on exactly this model."""
        known = self.metadata
        if hidden_size != known.hidden_size:
            raise ConfigurationError(
                f"artefact {self.name} takes hidden states of width {known.hidden_size}, those of {model!r} have "
                f"{hidden_size}: train one for this model (penstock predictor train)"
            )
        if fingerprint != known.model_fingerprint:
            raise ConfigurationError(
                f"artefact {self.name} was trained on {known.model!r} (checkpoint {known.model_fingerprint}) and says "
                f"nothing about {model!r} (checkpoint {fingerprint}): train one for it (penstock predictor train)"
            )


def save_artefact(folder: Path, metadata: ArtefactMetadata, network: Network) -> ArtefactMetadata:
    """Write an artefact, over an older one if need be: who reads meanwhile sees the one or the other. Returns the
    metadata with the fields that follow from the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for index, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        arrays[f"layers.{index}.weight"] = np.ascontiguousarray(weight)
        arrays[f"layers.{index}.bias"] = np.ascontiguousarray(bias)
    content = save(arrays)
    digest = hashlib.sha256(content).hexdigest()
    version = digest[:12]
    complete = msgspec.structs.replace(
        metadata, version=version, weights_file=f"weights-{version}.safetensors", weights_sha256=digest
    )
    _replace(folder / complete.weights_file, content)
    _replace(folder / METADATA_FILE, msgspec.json.format(msgspec.json.encode(complete), indent=2) + b"\n")
    for old in folder.glob("weights-*.safetensors"):
        if old.name != complete.weights_file:
            old.unlink()
    return complete


def load_artefact(folder: Path) -> Artefact:
    """Raises `ConfigurationError` for one that is missing, damaged, of another format or contradicts itself."""
    file = folder / METADATA_FILE
    try:
        metadata = msgspec.json.decode(file.read_bytes(), type=ArtefactMetadata)
        content = (folder / metadata.weights_file).read_bytes()
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{file} is no artefact of a length predictor: {error}") from error
    if metadata.format != FORMAT:
        raise ConfigurationError(f"{file} has format {metadata.format}, this version reads {FORMAT}: train it anew")
    if hashlib.sha256(content).hexdigest() != metadata.weights_sha256:
        raise ConfigurationError(
            f"{folder / metadata.weights_file} is not the file that {file} describes: train it anew"
        )
    try:
        arrays = load(content)
        layers = range(len(metadata.sizes))
        network = Network(
            tuple(arrays[f"layers.{index}.weight"].astype(np.float32) for index in layers),
            tuple(arrays[f"layers.{index}.bias"].astype(np.float32) for index in layers),
        )
    except (SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{folder / metadata.weights_file} does not hold the layers: {error!r}") from error
    _check(file, metadata, network)
    return Artefact(metadata, network)


def _check(file: Path, metadata: ArtefactMetadata, network: Network) -> None:
    if "test" not in metadata.mae_tokens:
        raise ConfigurationError(f"{file} says nothing of its error on held-out requests: train it anew")
    inputs = (input_width(metadata.inputs, metadata.hidden_size), *metadata.sizes[:-1])
    expected = tuple(zip(metadata.sizes, inputs, strict=False))  # of no layer at all there are no sizes
    if tuple(weight.shape for weight in network.weights) != expected or metadata.sizes[-1:] != (1,):
        raise ConfigurationError(
            f"{file} promises layers of the shapes {expected} and the weights have "
            f"{[weight.shape for weight in network.weights]}: train it anew"
        )


def _replace(file: Path, content: bytes) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(content)
    os.replace(partial, file)
