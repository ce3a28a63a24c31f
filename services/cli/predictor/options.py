"""Options that training and evaluation share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mesh.errors import ConfigurationError
from services.predictor.artefact import Artefact
from services.predictor.dataset import Dataset, DatasetFolder
from simulator.report.plot import require_matplotlib

Command = Callable[..., Any]


def data_option(command: Command) -> Command:
    """Add the required --data, the folder of collected data."""
    return click.option(
        "--data", type=click.Path(path_type=Path), required=True, help="Folder that `collect` has filled."
    )(command)


def output_options(command: Command) -> Command:
    """Add --json, as `as_json`, and --plots, as `plots`."""
    command = click.option(
        "--plots", type=click.Path(path_type=Path), help="Folder for pictures: losses and errors as PNG."
    )(command)
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def check_plots(plots: Path | None) -> None:
    """Raise `ConfigurationError` before long work begins if plots are wanted and matplotlib is missing."""
    if plots is not None:
        require_matplotlib()


def check_device(device: str) -> None:
    """Before long work. Raises ConfigurationError where torch is missing or has no such device."""
    try:
        import torch
    except ImportError as error:
        raise ConfigurationError("training needs PyTorch, which comes with the engine: make install") from error
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigurationError(f"--device {device}: {error}") from error


def read_dataset(data: Path) -> Dataset:
    """All samples of the folder, split into training, validation and test. Raises `ConfigurationError`."""
    return DatasetFolder(data).load()


def check_fits(artefact: Artefact, dataset: Dataset) -> None:
    """Raises ConfigurationError if the samples are of another model than the artefact's."""
    description = dataset.description
    artefact.check_model(description.model, description.model_fingerprint, description.hidden_size)
