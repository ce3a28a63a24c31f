"""Which processes make up a mesh on one machine (pure)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mesh.errors import ConfigurationError
from services.cli.supervisor.supervisor import ProcessSpec

DEMO_MODELS = Path(__file__).resolve().parents[3] / "demo" / "models"
MAX_WORKERS = 64


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to serve and the number of instances that serve it."""

    name: str
    path: Path
    workers: int


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """What `penstock up` was asked for."""

    models: tuple[ModelSpec, ...]
    engine: Literal["vllm", "simulated"]
    engine_options: tuple[str, ...]
    """NAME=VALUE, for every worker."""
    store_url: str
    http_host: str
    http_port: int


def parse_model(text: str, default_workers: int) -> ModelSpec:
    """NAME, NAME=PATH, and either with :COUNT behind it; a bare NAME is a demo model or a path of its own.

    Raises ConfigurationError if there is no such model.
    """
    body, workers = text, default_workers
    head, colon, tail = text.rpartition(":")
    if colon and tail.isdigit():
        body, workers = head, int(tail)
    name, equals, path_text = body.partition("=")
    if equals:
        path = Path(path_text)
    elif (DEMO_MODELS / Path(name).name).is_dir() and "/" not in name:
        path = DEMO_MODELS / name
    else:
        path, name = Path(name), Path(name).name
    if not (path / "tokenizer.json").is_file():
        known = ", ".join(sorted(entry.name for entry in DEMO_MODELS.iterdir() if entry.is_dir()))
        raise ConfigurationError(
            f"no model at {path}: --model takes a demo model ({known}), a directory with a Hugging Face "
            "checkpoint, or NAME=DIRECTORY"
        )
    if not 1 <= workers <= MAX_WORKERS:
        raise ConfigurationError(f"--model {text}: {workers} instances asked for, 1 to {MAX_WORKERS} are possible here")
    return ModelSpec(name, path.resolve(), workers)


def processes(mesh: LocalMesh) -> tuple[ProcessSpec, ...]:
    """All processes, in the order in which they are started."""
    control_plane = tuple(
        _process(mesh, role, role) for role in ("monitor", "scheduler", "predictor", "cascade", "planner")
    )
    frontend = _process(mesh, "frontend", "frontend", "--http-host", mesh.http_host, "--http-port", str(mesh.http_port))
    return (*_workers(mesh), frontend, *control_plane)


def _workers(mesh: LocalMesh) -> tuple[ProcessSpec, ...]:
    specs: list[ProcessSpec] = []
    engine = (
        "--engine",
        mesh.engine,
        *(part for option in mesh.engine_options for part in ("--engine-option", option)),
    )
    for model in mesh.models:
        for index in range(model.workers):
            name = f"{model.name}-{index}"
            options = (*engine, "--model", model.name, "--model-path", str(model.path))
            specs.append(_process(mesh, "worker", name, *options))
    return tuple(specs)


def _process(mesh: LocalMesh, role: str, name: str, *options: str) -> ProcessSpec:
    return ProcessSpec(name, role, ("--store", mesh.store_url, "--member-id", name, *options))
