"""Makes the engine that the settings name. Only that engine's modules are imported: the simulated one runs where
torch and vLLM are not installed."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

from controlplane.prediction.length_error import LengthErrorModel
from engine_worker.adapters import ReadDigest, adapter_digest, parse_modules
from engine_worker.checkpoint_source import is_hugging_face_id
from engine_worker.device import vllm_device
from engine_worker.engine_args import engine_settings
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.interface import Engine, EngineContext, EngineFactory, ModelIdentity
from engine_worker.engines.simulated_lora import SimulatedAdapters
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.host_tier.settings import (
    OF_THIS_MACHINE,
    HostStores,
    HostTierSettings,
    host_tier_settings,
    parse_disk,
)
from engine_worker.kv.fabric import KvFabric
from engine_worker.kv.settings import KvTransferSettings
from engine_worker.kv.ucx_worker import ucx_fabric
from engine_worker.settings import WorkerSettings
from engine_worker.vocabulary import read_vocabulary
from mesh.errors import ConfigurationError
from mesh.plugins import PluginRegistry
from mesh.runtime import Clock, Entropy
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig

log = logging.getLogger(__name__)

LOCAL_HOST: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class SimulatedSettings:
    """Settings of the simulated engine (`--engine-arg`)."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    cost: LinearCost = field(default_factory=LinearCost)
    time_scale: float = 1.0
    """Multiplies every duration of the cost model."""
    pace_file: str = ""
    """A file with a number that multiplies the duration of each step too, read again whenever it has changed."""
    tensor_parallel_size: int = 1
    """What the instance says of itself; its costs are those of `cost`, however many GPUs they stand for."""
    pipeline_parallel_size: int = 1
    """GPUs that the instance stands for by pipeline parallelism; changes no cost."""
    tokenizer_mode: str = ""
    """How vLLM would make prompts of this model's chats, by its name; empty: by the chat template."""
    enable_lora: bool = False
    """Serve LoRA adapters: what is said depends on the checksum of the adapter's files."""
    max_loras: int = 1
    """Adapters that one step may serve, as far as placement goes: simulated steps serve any number."""
    max_cpu_loras: int = 0
    """Adapters that may be loaded; 0: `max_loras`."""
    lora_modules: str = ""
    """Adapters to begin with: NAME=PATH,NAME=PATH."""
    runner: Literal["generate", "pooling"] = "generate"
    """pooling: vectors and scores of prompts instead of answers, as with vLLM."""
    embedding_dimensions: int = 64
    """Of those vectors."""
    media_tokens: tuple[tuple[str, int], ...] = ()
    """Modalities and their placeholders' tokens; by default the tokenizer's `<image>`, `<audio>` and `<video>`."""
    media_per_prompt: int = 8
    """How many of each one prompt may hold."""
    predict_lengths: bool = True
    """Say how long requests will get, in place of a predictor, with the errors of `length_error`."""
    length_error: LengthErrorModel = field(default_factory=LengthErrorModel)
    kv_host: str = LOCAL_HOST
    """Address that the KV transfer agent listens on; by default the worker's."""
    kv_port: int = 0
    """The agent's port; by default the worker's."""
    host_kv_bytes: int = 0
    """Of the store of KV blocks in its host's memory; by default the worker's, `--host-kv`."""
    host_kv_dir: str = ""
    """Where that is; by default the worker's."""
    disk_kv: str = ""
    """The store on disk behind it; by default the worker's, `--disk-kv`."""


def make_engine(settings: WorkerSettings, seed: int, clock: Clock) -> Engine:
    """The engine, not started yet. `seed` is for requests that bring none. Raises ConfigurationError."""
    factory = ENGINES.get(settings.engine)
    context = EngineContext(
        settings.model_path,
        seed,
        clock,
        settings.reasoning_parser,
        kv_host=settings.kv_host or LOCAL_HOST,
        kv_port=settings.kv_port,
        host_kv_bytes=host_tier_settings(settings.host_kv, settings.host_kv_dir, settings.disk_kv).nbytes,
        host_kv_dir=settings.host_kv_dir,
        disk_kv=settings.disk_kv,
    )
    arguments = engine_settings(
        factory.settings, settings.engine_arg, factory.defaults(context), others=factory.other_args
    )
    return factory.make(arguments, context)


async def identified(settings: WorkerSettings, clock: Clock) -> WorkerSettings:
    """With name and source of the model that the engine has, where they are left empty.

    Waits for an engine that somebody else starts. Raises ConfigurationError, and what `EngineFactory.identify` raises.
    """
    factory = ENGINES.get(settings.engine)
    if factory.identify is None:
        if not (settings.model and settings.model_path):
            raise ConfigurationError(f"--model and --model-path: the engine {settings.engine} must be told both")
        return settings
    context = EngineContext(settings.model_path, 0, clock)
    arguments = engine_settings(
        factory.settings, settings.engine_arg, factory.defaults(context), others=factory.other_args
    )
    model = await factory.identify(arguments, clock)
    source = settings.model_path or model.source
    if not _is_at_hand(source):
        said = f"has it from {source}, which is not on this machine" if source else "does not say where it is"
        raise ConfigurationError(
            f"the tokenizer of {model.name} is missing: the server {said}; give a directory or a model of the Hugging "
            "Face Hub by --tokenizer (of `penstock attach`) or --model-path (of `penstock serve worker`)"
        )
    return replace(settings, model=settings.model or model.name, model_path=source)


def _is_at_hand(source: str) -> bool:
    return bool(source) and (Path(source).is_dir() or is_hugging_face_id(source))


def make_simulated(
    settings: WorkerSettings,
    clock: Clock,
    make_fabric: Callable[[KvTransferSettings], KvFabric],
    read_digest: ReadDigest = adapter_digest,
    stores: HostStores = OF_THIS_MACHINE,
    entropy: Entropy | None = None,
) -> Engine:
    """The simulated engine. `make_fabric`: what its blocks travel over; `read_digest`: the checksum of the LoRA adapter
    at a path; `stores`: what its host keeps of its KV; `entropy`: the system's by default. Raises
    ConfigurationError."""
    return _simulated(simulated_settings(settings), clock, make_fabric, read_digest, stores, entropy)


def simulated_settings(settings: WorkerSettings) -> SimulatedSettings:
    """Settings of the simulated engine of such a worker: the worker's engine arguments, and its model's vocabulary.
    Raises ConfigurationError."""
    defaults = _simulated_defaults(
        settings.model_path,
        kv_host=settings.kv_host or LOCAL_HOST,
        kv_port=settings.kv_port,
        host_kv_bytes=host_tier_settings(settings.host_kv, settings.host_kv_dir, settings.disk_kv).nbytes,
        host_kv_dir=settings.host_kv_dir,
        disk_kv=settings.disk_kv,
    )
    return engine_settings(SimulatedSettings, settings.engine_arg, defaults)


def _simulated(
    settings: SimulatedSettings,
    clock: Clock,
    make_fabric: Callable[[KvTransferSettings], KvFabric] = ucx_fabric,
    read_digest: ReadDigest = adapter_digest,
    stores: HostStores = OF_THIS_MACHINE,
    entropy: Entropy | None = None,
) -> Engine:
    """Its answers depend on prompt and request alone."""
    from engine_worker.engines.simulated_pace import PaceFile, steady

    pace = PaceFile(settings.pace_file) if settings.pace_file else steady
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
            pace=pace,
        )
    from engine_worker.engines.simulated_lengths import LengthPredictingSimulatedEngine
    from engine_worker.engines.simulated_media import SimulatedMedia

    return LengthPredictingSimulatedEngine(
        settings.instance,
        settings.cost,
        clock,
        length_error=settings.length_error if settings.predict_lengths else None,
        media=SimulatedMedia(dict(settings.media_tokens), settings.media_per_prompt),
        time_scale=settings.time_scale,
        tensor_parallel=settings.tensor_parallel_size,
        pipeline_parallel=settings.pipeline_parallel_size,
        tokenizer_mode=settings.tokenizer_mode,
        make_fabric=make_fabric,
        kv_host=settings.kv_host,
        kv_port=settings.kv_port,
        entropy=entropy,
        lora=_simulated_adapters(settings, clock, read_digest),
        host=HostTierSettings(settings.host_kv_bytes, settings.host_kv_dir, *parse_disk(settings.disk_kv)),
        stores=stores,
        pace=pace,
    )


def _simulated_adapters(settings: SimulatedSettings, clock: Clock, read_digest: ReadDigest) -> SimulatedAdapters | None:
    modules = parse_modules(settings.lora_modules)
    if not settings.enable_lora:
        if modules:
            raise ConfigurationError("lora_modules needs enable_lora=true")
        return None
    if settings.max_loras < 1:
        raise ConfigurationError(f"max_loras must be at least 1, got {settings.max_loras}")
    return SimulatedAdapters(settings.max_loras, settings.max_cpu_loras, clock.now_s, modules, read_digest)


def _simulated_defaults(model_path: str, **where: str | int) -> dict[str, Any]:
    """`where`: fields that have their default from the worker."""
    vocabulary = read_vocabulary(Path(model_path))
    if vocabulary is None:
        log.warning("no tokenizer.json: the vocabulary is assumed", extra={"model_path": model_path})
        return where
    output = {
        "vocabulary_tokens": vocabulary.size_tokens,
        "first_token_id": vocabulary.first_token_id,
        "last_token_id": vocabulary.last_token_id,
        "eos_token_id": vocabulary.eos_token_id,
        "byte_token_ids": list(vocabulary.byte_token_ids),
        "word_token_ids": list(vocabulary.word_token_ids),
    }
    media_tokens = [list(each) for each in vocabulary.media_tokens]
    return {"instance": {"output": output}, "media_tokens": media_tokens, **where}


def _vllm(settings: VllmSettings) -> Engine:
    from engine_worker.engines.vllm.data_parallel import vllm_engine

    return vllm_engine(settings)


def _attached(settings: AttachedSettings, clock: Clock) -> Engine:
    from engine_worker.engines.attached.data_parallel import attached_engine
    from engine_worker.engines.attached.probe import with_secrets

    return attached_engine(with_secrets(settings, os.environ), clock)


async def _identify(settings: AttachedSettings, clock: Clock) -> ModelIdentity:
    from engine_worker.engines.attached.probe import identify, with_secrets

    return await identify(with_secrets(settings, os.environ), clock)


OWN_ENGINES: Final[Mapping[str, EngineFactory]] = MappingProxyType(
    {
        "vllm": EngineFactory(
            VllmSettings,
            make=lambda settings, _: _vllm(settings),
            defaults=lambda context: {
                "model_path": context.model_path,
                "seed": context.seed,
                "reasoning_parser": context.reasoning_parser,
                "kv_host": context.kv_host,
                "kv_port": context.kv_port,
                "host_kv_bytes": context.host_kv_bytes,
                "host_kv_dir": context.host_kv_dir,
                "disk_kv": context.disk_kv,
            },
            device=vllm_device,
            other_args="others",
            uses_gpus=True,
        ),
        "simulated": EngineFactory(
            SimulatedSettings,
            make=lambda settings, context: _simulated(settings, context.clock),
            defaults=lambda context: _simulated_defaults(
                context.model_path,
                kv_host=context.kv_host,
                kv_port=context.kv_port,
                host_kv_bytes=context.host_kv_bytes,
                host_kv_dir=context.host_kv_dir,
                disk_kv=context.disk_kv,
            ),
            device=lambda: "simulated",
            needs_weights=False,
        ),
        "attached": EngineFactory(
            AttachedSettings,
            make=lambda settings, context: _attached(settings, context.clock),
            defaults=lambda context: {"model_path": context.model_path},
            device=lambda: "attached",
            needs_weights=False,
            identify=lambda settings, clock: _identify(settings, clock),
        ),
    }
)
ENGINES: Final = PluginRegistry("penstock.engines", "engine", EngineFactory, OWN_ENGINES)
"""Penstock's own engines and those of installed packages."""
