"""Trains the network (STAR, section 4.4): L1 loss, AdamW, early stopping on the validation error. Imports torch."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from services.predictor.network import Network


@dataclass(frozen=True, slots=True)
class TrainingSettings:
    """How to train. The hidden sizes are the paper's for a model of width 3584."""

    hidden_sizes: tuple[int, ...] = (2048, 512, 64)
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    batch_samples: int = 128
    epochs: int = 100
    patience_epochs: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Epoch:
    """Errors after one pass over the training samples, in tokens."""

    number: int
    train_mae_tokens: float
    """While learning, so of weights that changed meanwhile."""
    validation_mae_tokens: float
    is_best: bool


_VALIDATION_BATCH: Final = 8192


@dataclass(slots=True)
class _Course:
    """Everything that changes while the network learns."""

    model: nn.Sequential
    optimiser: torch.optim.AdamW
    shuffle: torch.Generator
    epochs: list[Epoch]
    best: dict[str, torch.Tensor]

    @property
    def best_epoch(self) -> Epoch | None:
        """The last one that was better than all before."""
        return next((epoch for epoch in reversed(self.epochs) if epoch.is_best), None)


def train_network(
    train: tuple[NDArray[np.float32], NDArray[np.int32]],
    validation: tuple[NDArray[np.float32], NDArray[np.int32]],
    settings: TrainingSettings,
    on_epoch: Callable[[Epoch], None],
    device: str = "cpu",
    checkpoint: Path | None = None,
) -> Network:
    """The network of the best epoch. Both pairs are inputs (samples x width) and remaining tokens.

    With a `checkpoint` file the course is written there after each epoch, and a call with the same settings goes on
    from it, telling `on_epoch` of the epochs that are past again; the file is removed at the end.
    """
    torch.manual_seed(settings.seed)
    inputs, targets = torch.from_numpy(train[0]).to(device), torch.from_numpy(train[1]).float().to(device)
    offset, scale = inputs.mean(dim=0), inputs.std(dim=0).clamp_min(1e-6)
    unit_tokens = float(targets.mean())
    normal = (inputs - offset) / scale
    held_inputs = (torch.from_numpy(validation[0]).to(device) - offset) / scale
    held_targets = torch.from_numpy(validation[1]).float().to(device)
    course = _course(inputs.shape[1], settings, device)
    key = (settings, tuple(inputs.shape), tuple(held_inputs.shape), unit_tokens)
    if checkpoint is not None:
        _load_checkpoint(course, checkpoint, key)
    for epoch in course.epochs:
        on_epoch(epoch)
    while not _is_over(course, settings):
        train_mae = _learn(course, normal, targets, unit_tokens, settings.batch_samples)
        held_mae = _mae_tokens(course.model, held_inputs, held_targets, unit_tokens)
        best = course.best_epoch
        epoch = Epoch(
            len(course.epochs) + 1, train_mae, held_mae, best is None or held_mae < best.validation_mae_tokens
        )
        course.epochs.append(epoch)
        if epoch.is_best:
            course.best = {name: value.detach().clone() for name, value in course.model.state_dict().items()}
        if checkpoint is not None:
            _save_checkpoint(course, checkpoint, key)
        on_epoch(epoch)
    course.model.load_state_dict(course.best)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return _folded(course.model, offset, scale, unit_tokens)


def _course(width: int, settings: TrainingSettings, device: str) -> _Course:
    model = _perceptron(width, settings.hidden_sizes).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    return _Course(model, optimiser, torch.Generator().manual_seed(settings.seed), [], model.state_dict())


def _is_over(course: _Course, settings: TrainingSettings) -> bool:
    best, done = course.best_epoch, len(course.epochs)
    return done >= settings.epochs or (best is not None and done - best.number >= settings.patience_epochs)


def _learn(
    course: _Course, inputs: torch.Tensor, targets: torch.Tensor, unit_tokens: float, batch_samples: int
) -> float:
    """One pass; returns the mean absolute error in tokens."""
    order = torch.randperm(len(inputs), generator=course.shuffle).to(inputs.device)
    absolute = torch.zeros((), device=inputs.device)
    for batch in order.split(batch_samples):
        loss = nn.functional.l1_loss(course.model(inputs[batch])[:, 0], targets[batch] / unit_tokens)
        course.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        course.optimiser.step()
        absolute += loss.detach() * len(batch)
    return float(absolute) * unit_tokens / len(inputs)


def _save_checkpoint(course: _Course, file: Path, key: object) -> None:
    partial = file.with_name(f"{file.name}.partial")
    torch.save(
        {
            "key": repr(key),
            "model": course.model.state_dict(),
            "optimiser": course.optimiser.state_dict(),
            "shuffle": course.shuffle.get_state(),
            "epochs": [dataclasses.asdict(epoch) for epoch in course.epochs],
            "best": course.best,
        },
        partial,
    )
    os.replace(partial, file)


def _load_checkpoint(course: _Course, file: Path, key: object) -> None:
    """Go on where another run stopped; one of other settings or samples is ignored, and overwritten."""
    if not file.exists():
        return
    kept = torch.load(file, weights_only=True)
    if kept["key"] != repr(key):
        return
    course.model.load_state_dict(kept["model"])
    course.optimiser.load_state_dict(kept["optimiser"])
    course.shuffle.set_state(kept["shuffle"])
    course.epochs.extend(Epoch(**epoch) for epoch in kept["epochs"])
    course.best = kept["best"]


def _perceptron(width: int, hidden_sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in hidden_sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1))


def _mae_tokens(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, unit_tokens: float) -> float:
    with torch.inference_mode():
        predicted = torch.cat([model(part)[:, 0] for part in inputs.split(_VALIDATION_BATCH)]) * unit_tokens
    # As it is served: a running request has at least one token to come.
    return float((predicted.clamp_min(1.0) - targets).abs().mean())


def _folded(model: nn.Sequential, offset: torch.Tensor, scale: torch.Tensor, unit_tokens: float) -> Network:
    """The scales of inputs and output become part of the first and the last layer."""
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().double().cpu() for layer in layers]
    biases = [layer.bias.detach().double().cpu() for layer in layers]
    weights[0] = weights[0] / scale.double().cpu()
    biases[0] = biases[0] - weights[0] @ offset.double().cpu()
    weights[-1], biases[-1] = weights[-1] * unit_tokens, biases[-1] * unit_tokens
    return Network(tuple(weight.float().numpy() for weight in weights), tuple(bias.float().numpy() for bias in biases))
