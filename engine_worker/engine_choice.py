"""Makes the engine that the settings name. Only that engine's modules are imported: the simulated one runs where
torch and vLLM are not installed."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from controlplane.prediction.length_error import LengthErrorModel
from engine_worker.device import vllm_device
from engine_worker.engine_args import engine_settings
from engine_worker.engines.interface import Engine, EngineContext, EngineFactory
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_worker import ucx_fabric
from engine_worker.settings import WorkerSettings
from engine_worker.vocabulary import read_vocabulary
from mesh.plugins import PluginRegistry
from mesh.runtime import Clock
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """Settings of the simulated engine (`--engine-arg`)."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    cost: LinearCost = field(default_factory=LinearCost)
    time_scale: float = 1.0
    """Multiplies every duration of the cost model."""
    tensor_parallel_size: int = 1
    """What the instance says of itself; its costs are those of `cost`, however many GPUs they stand for."""
    pipeline_parallel_size: int = 1
    """GPUs that the instance stands for by pipeline parallelism; changes no cost."""
    runner: Literal["generate", "pooling"] = "generate"
    """pooling: vectors and scores of prompts instead of answers, as with vLLM."""
    embedding_dimensions: int = 64
    """Of those vectors."""
    predict_lengths: bool = True
    """Say how long requests will get, in place of a predictor, with the errors of `length_error`."""
    length_error: LengthErrorModel = field(default_factory=LengthErrorModel)


def make_engine(settings: WorkerSettings, seed: int, clock: Clock) -> Engine:
    """The engine, not started yet. `seed` is for requests that bring none. Raises ConfigurationError."""
    factory = ENGINES.get(settings.engine)
    context = EngineContext(settings.model_path, seed, clock, settings.reasoning_parser or "")
    arguments = engine_settings(
        factory.settings, settings.engine_arg, factory.defaults(context), others=factory.other_args
    )
    return factory.make(arguments, context)


def make_simulated(
    settings: WorkerSettings, clock: Clock, make_fabric: Callable[[KvTransferSettings], KvFabric]
) -> Engine:
    """The simulated engine. `make_fabric`: what its blocks travel over. Raises ConfigurationError."""
    return _simulated(simulated_settings(settings), clock, make_fabric)


def simulated_settings(settings: WorkerSettings) -> SimulatedSettings:
    """Settings of the simulated engine of such a worker: the worker's engine arguments, and its model's vocabulary.
    Raises ConfigurationError."""
    return engine_settings(SimulatedSettings, settings.engine_arg, _simulated_defaults(settings.model_path))


def _simulated(
    settings: SimulatedSettings, clock: Clock, make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric
) -> Engine:
    """Its answers depend on prompt and request alone."""
    if settings.runner == "pooling":
        from engine_worker.engines.simulated_pooling import PoolingSimulatedEngine

        return PoolingSimulatedEngine(
            settings.instance,
            settings.cost,
            clock,
            time_scale=settings.time_scale,
            tensor_parallel=settings.tensor_parallel_size,
            pipeline_parallel=settings.pipeline_parallel_size,
            dimensions=settings.embedding_dimensions,
        )
    from engine_worker.engines.simulated_lengths import LengthPredictingSimulatedEngine

    return LengthPredictingSimulatedEngine(
        settings.instance,
        settings.cost,
        clock,
        length_error=settings.length_error if settings.predict_lengths else None,
        time_scale=settings.time_scale,
        tensor_parallel=settings.tensor_parallel_size,
        pipeline_parallel=settings.pipeline_parallel_size,
        make_fabric=make_fabric,
    )


def _simulated_defaults(model_path: str) -> dict[str, Any]:
    vocabulary = read_vocabulary(Path(model_path))
    if vocabulary is None:
        log.warning("no tokenizer.json: the vocabulary is assumed", extra={"model_path": model_path})
        return {}
    output = {
        "vocabulary_tokens": vocabulary.size_tokens,
        "first_token_id": vocabulary.first_token_id,
        "last_token_id": vocabulary.last_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "byte_token_ids": list(vocabulary.byte_token_ids),
    }
    return {"instance": {"output": output}}


def _vllm(settings: VllmSettings) -> Engine:
    from engine_worker.engines.vllm.engine import VllmEngine

    return VllmEngine(settings)


OWN_ENGINES: Final[Mapping[str, EngineFactory]] = MappingProxyType(
    {
        "vllm": EngineFactory(
            VllmSettings,
            make=lambda settings, _: _vllm(settings),
            defaults=lambda context: {
                "model_path": context.model_path,
                "seed": context.seed,
                "reasoning_parser": context.reasoning_parser,
            },
            device=vllm_device,
            other_args="others",
            uses_gpus=True,
        ),
        "simulated": EngineFactory(
            SimulatedSettings,
            make=lambda settings, context: _simulated(settings, context.clock),
            defaults=lambda context: _simulated_defaults(context.model_path),
            device=lambda: "simulated",
            needs_weights=False,
        ),
    }
)
ENGINES: Final = PluginRegistry("penstock.engines", "engine", EngineFactory, OWN_ENGINES)
"""Penstock's own engines and those of installed packages."""
