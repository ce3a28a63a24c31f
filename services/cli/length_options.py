"""What `penstock up` is told of length prediction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from services.cli.supervisor.local_mesh import ModelSpec, demo_predictors

Command = Callable[..., Any]


def length_options(command: Command) -> Command:
    """Add --predictor-artefact, --learn-lengths and --learnt-dir."""
    command = click.option(
        "--learnt-dir",
        type=click.Path(path_type=Path),
        help="Directory where what is learnt of lengths outlives a restart. Default: beside --store-file, if any.",
    )(command)
    command = click.option(
        "--learn-lengths",
        is_flag=True,
        help="Learn the lengths of demo models, too, in place of the predictors that come with them.",
    )(command)
    return click.option(
        "--predictor-artefact",
        multiple=True,
        type=click.Path(path_type=Path),
        help="Folder of a length predictor, as `penstock predictor train` writes it; repeatable. Default: for demo "
        "models on vLLM those that come with them. Of other models the lengths are learnt while they are served.",
    )(command)


def predictor_artefacts(
    asked: tuple[Path, ...], models: tuple[ModelSpec, ...], engine: str, *, learns_all: bool
) -> tuple[Path, ...]:
    """Simulated engines have no hidden states to predict from, unless somebody asks for a predictor all the same."""
    comes_with_them = engine == "vllm" and not learns_all
    return tuple(folder.resolve() for folder in asked) or (demo_predictors(models) if comes_with_them else ())


def learnt_dir_of(asked: Path | None, store_file: Path | None) -> Path | None:
    """Beside the file of the store, which outlives the mesh, unless another is named."""
    if asked is not None:
        return asked.resolve()
    return None if store_file is None else store_file.resolve().with_suffix(".learnt")
