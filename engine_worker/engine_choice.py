"""Makes the engine that the settings name. Only that engine's modules are imported: the simulated one runs where
torch and vLLM are not installed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controlplane.prediction.length_error import LengthErrorModel
from engine_worker.engine_options import engine_settings
from engine_worker.engines.interface import Engine
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_worker import ucx_fabric
from engine_worker.settings import WorkerSettings
from engine_worker.vocabulary import read_vocabulary
from mesh.runtime import Clock
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """What the simulated engine is told."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    cost: LinearCost = field(default_factory=LinearCost)
    time_scale: float = 1.0
    """Multiplies every duration of the cost model."""
    tensor_parallel: int = 1
    """What the instance says of itself; its costs are those of `cost`, however many GPUs they stand for."""
    pipeline_parallel: int = 1
    """The same."""
    foretell_lengths: bool = True
    """Say how long requests will get, in place of a predictor, with the errors of `length_error`."""
    length_error: LengthErrorModel = field(default_factory=LengthErrorModel)


def make_engine(settings: WorkerSettings, seed: int, clock: Clock) -> Engine:
    """The engine, not started yet. `seed` is for requests that bring none. Raises ConfigurationError."""
    if settings.engine == "vllm":
        return _make_vllm(settings, seed)
    return make_simulated(settings, clock)


def make_simulated(
    settings: WorkerSettings, clock: Clock, make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric
) -> Engine:
    """The engine without weights; its answers depend on prompt and request alone. `make_fabric`: what its blocks
    travel over. Raises ConfigurationError."""
    from engine_worker.engines.simulated_lengths import ForetellingSimulatedEngine

    chosen = simulated_settings(settings)
    return ForetellingSimulatedEngine(
        chosen.instance,
        chosen.cost,
        clock,
        length_error=chosen.length_error if chosen.foretell_lengths else None,
        time_scale=chosen.time_scale,
        tensor_parallel=chosen.tensor_parallel,
        pipeline_parallel=chosen.pipeline_parallel,
        make_fabric=make_fabric,
    )


def simulated_settings(settings: WorkerSettings) -> SimulatedSettings:
    """What the simulated engine of such a worker is told: the worker's engine options, and its model's vocabulary.
    Raises ConfigurationError."""
    return engine_settings(SimulatedSettings, settings.engine_option, _simulated_defaults(settings))


def _simulated_defaults(settings: WorkerSettings) -> dict[str, Any]:
    vocabulary = read_vocabulary(Path(settings.model_path))
    if vocabulary is None:
        log.warning("no tokenizer.json: the vocabulary is assumed", extra={"model_path": settings.model_path})
        return {}
    output = {
        "vocabulary_tokens": vocabulary.size_tokens,
        "first_token_id": vocabulary.first_token_id,
        "last_token_id": vocabulary.last_token_id,
        "eos_token_id": vocabulary.eos_token_id,
    }
    return {"instance": {"output": output}}


def _make_vllm(settings: WorkerSettings, seed: int) -> Engine:
    from engine_worker.engines.vllm.engine import VllmEngine
    from engine_worker.engines.vllm.settings import VllmSettings

    defaults = {"model_path": settings.model_path, "seed": seed}
    return VllmEngine(engine_settings(VllmSettings, settings.engine_option, defaults))
