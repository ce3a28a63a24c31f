"""What a vLLM engine is started with: the worker's settings, and every other engine argument by vLLM's own parser.
Imports vLLM."""

from argparse import Action
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from engine_worker.engines.text import MISTRAL_MODE
from engine_worker.engines.vllm.checkpoint import has_mistral_tokenizer
from engine_worker.engines.vllm.connector.settings import CONNECTOR_CLASS, CONNECTOR_MODULE
from engine_worker.engines.vllm.environment import Device, has_one_process_each
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS
from engine_worker.engines.vllm.kv_events import BUFFERED_BATCHES
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import ConfigurationError
from mesh.text_files import has_tokenizer

_CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
SPARE_LORAS: Final = 1
"""Slots for LoRA adapters that stay empty on a CPU."""

MESH_SETS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "model": "name it with --model",
        "served_model_name": "name it with --model NAME=DIRECTORY",
        "tokenizer": "text is the frontend's, by the tokenizer that lies beside the weights",
        "skip_tokenizer_init": "structured_outputs=false is what leaves the tokenizer out",
        "scheduling_policy": "requests have priorities",
        "generation_config": "give --generation-config to the worker, which tells the frontends",
        "override_generation_config": "give --override-generation-config to the worker, which tells the frontends",
        "kv_events_config": "the prefix index lives on them",
        "kv_transfer_config": "requests move by it",
        "worker_extension_cls": "hidden states come by it",
        "disable_log_stats": "load reports come by it",
        "enable_logging_iteration_details": "load reports come by it",
    }
)
"""vLLM's arguments that cannot be given, and why."""


@dataclass(frozen=True, slots=True)
class KvEndpoints:
    """Where the engine core publishes its KV events, where it replays them, its end of the control channel for requests
    that move (None: they do not), and what its host's store is found by (see `host_key`; empty: there is none)."""

    events: str
    replay: str
    moves: str | None
    host_key: str = ""


def engine_arguments(settings: VllmSettings, device: Device, endpoints: KvEndpoints) -> AsyncEngineArgs:
    """What vLLM is started with. Raises ConfigurationError for arguments that its own parser does not take."""
    on_cpu, cores = device == "cpu", settings.data_parallel_size
    kv_cache_bytes = settings.kv_cache_memory_bytes
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = _CPU_KV_CACHE_BYTES
    pools = settings.runner == "pooling"
    # vLLM knows which pooling models may have a prefix cache.
    others: dict[str, Any] = {"enable_prefix_caching": None if pools else True} | parse_others(settings.others)
    if endpoints.host_key and not str(others.get("prefix_caching_hash_algo", "sha256")).startswith("sha256"):
        raise ConfigurationError(
            f"prefix_caching_hash_algo={others['prefix_caching_hash_algo']}: with --host-kv blocks are named by vLLM's "
            "hashes, which must be such that no two contents share one: sha256 or sha256_cbor"
        )
    if others.get("tokenizer_mode", "auto") == "auto" and has_mistral_tokenizer(Path(settings.model_path)):
        others["tokenizer_mode"] = MISTRAL_MODE
    if on_cpu and others.get("enable_lora"):
        others |= _with_spare_lora(others)
    return AsyncEngineArgs(
        model=settings.model_path,
        runner=settings.runner,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_logprobs=settings.max_logprobs,
        kv_cache_memory_bytes=kv_cache_bytes,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        pipeline_parallel_size=settings.pipeline_parallel_size,
        data_parallel_size=settings.data_parallel_size,
        # By itself vLLM has a process more for each of several cores (see `environment`).
        distributed_executor_backend="uni" if on_cpu and cores > 1 and has_one_process_each(settings) else None,
        enforce_eager=on_cpu if settings.enforce_eager is None else settings.enforce_eager,
        scheduling_policy="priority",
        # Text stays in the frontend, and a tokenizer costs start-up time and memory. Grammars need it.
        skip_tokenizer_init=not _has_grammars(settings),
        reasoning_parser=settings.reasoning_parser,
        # vLLM's periodic log line; the statistics themselves reach the stat logger all the same.
        disable_log_stats=True,
        # Despite its name, this is what puts the tokens that a step prefilled into the statistics.
        enable_logging_iteration_details=True,
        kv_events_config=None
        if pools
        else KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=endpoints.events,
            replay_endpoint=endpoints.replay,
            buffer_steps=BUFFERED_BATCHES,
            hwm=BUFFERED_BATCHES,
        ),
        worker_extension_cls=EXTENSION_CLASS,
        kv_transfer_config=None
        if endpoints.moves is None
        else _connector(settings, device, endpoints.moves, endpoints.host_key),
        **others,
    )


def _with_spare_lora(others: Mapping[str, Any]) -> dict[str, int]:
    """One slot more than adapters. vLLM's kernels for CPUs (0.32, `torch_ops`) take the slot before the first for a
    request without an adapter, which is the last: where that has an adapter, and another one is in the same step, the
    request is answered under it. So as many are loaded as have a slot, and the last one stays empty, which is zero."""
    loras = max(others.get("max_loras") or 1, others.get("max_cpu_loras") or 1)
    return {"max_loras": loras + SPARE_LORAS, "max_cpu_loras": loras + SPARE_LORAS}


def _has_grammars(settings: VllmSettings) -> bool:
    asked = settings.structured_outputs
    return has_tokenizer(Path(settings.model_path)) if asked is None else asked


def parse_others(arguments: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of `vllm serve`, by vLLM's own parser: fields of its arguments. A list is written with commas, a flag
    as true or false, a field of a JSON argument as NAME.FIELD=VALUE. Raises ConfigurationError."""
    if not arguments:
        return {}
    parser = _Parser(prog="--engine-arg", add_help=False, allow_abbrev=False)
    AsyncEngineArgs.add_cli_args(parser)
    actions = {action.dest: action for action in parser._actions}
    words: list[str] = []
    given: list[str] = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        first = name.partition(".")[0]
        if first in MESH_SETS:
            raise ConfigurationError(f"engine argument {argument!r}: the mesh sets {first} itself ({MESH_SETS[first]})")
        if first not in actions:
            near = get_close_matches(first, [*actions, *(field.name for field in fields(VllmSettings))], 3)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; `vllm serve --help` lists them"
            raise ConfigurationError(f"engine argument {argument!r}: neither vLLM nor its worker knows {first}{hint}")
        words += _words(actions[first], name, value)
        given.append(first)
    parsed = parser.parse_args(words)
    return {name: getattr(parsed, name) for name in given}


def _words(action: Action, name: str, value: str) -> list[str]:
    """As a command line has them."""
    first, dot, path = name.partition(".")
    flag = f"--{first.replace('_', '-')}{dot}{path}"
    if action.nargs == 0 and "." not in name:  # --flag and --no-flag
        if value.lower() not in ("true", "false"):
            raise ConfigurationError(f"engine argument {name}={value}: it is true or false")
        return [flag if value.lower() == "true" else f"--no-{flag[2:]}"]
    if action.nargs in ("+", "*"):
        return [flag, *value.split(",")]
    return [f"{flag}={value}"]


class _Parser(FlexibleArgumentParser):
    """Raises where argparse prints and ends the process."""

    def error(self, message: str) -> NoReturn:
        """Called with what is wrong."""
        raise ConfigurationError(f"engine arguments: vLLM's parser says: {message}")


def _connector(settings: VllmSettings, device: Device, endpoint: str, host_key: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=CONNECTOR_CLASS,
        kv_connector_module_path=CONNECTOR_MODULE,
        kv_role="kv_both",
        # What could not be pulled ends the carrier that was to bring it, and nothing else.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "endpoint": endpoint,
            "device": device,
            "host": settings.kv_host,
            "port": settings.kv_port,
            "model": Path(settings.model_path).name,
            "host_key": host_key,
            "host_kv_bytes": settings.host_kv_bytes,
            "host_kv_dir": settings.host_kv_dir,
            "disk_kv": settings.disk_kv,
        },
    )
