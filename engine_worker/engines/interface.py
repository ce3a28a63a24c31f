"""What the mesh asks of an engine. Penstock has three, `vllm`, `simulated` and `attached`; installed packages may add
others."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, StepOutput
from engine_worker.device import cpu_device
from mesh.runtime import Clock


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine turned out to hold once it was started."""

    block_tokens: int
    kv_blocks: int
    max_model_len_tokens: int
    max_batch_requests: int
    max_step_tokens: int
    tensor_parallel: int = 1
    """GPUs (or processes on a CPU) that share each layer."""
    pipeline_parallel: int = 1
    """Groups of these that each hold a part of the layers."""
    data_parallel: int = 1
    """Engine cores that each have a copy of the model, and KV of their own."""
    max_loras: int = 0
    """LoRA adapters that one step may serve; 0: it serves none."""
    label: str = ""
    """What it turned out to be, for `penstock status`, where its name does not say enough."""
    http_url: str = ""
    """Where it takes requests over HTTP from others than the worker, too; empty: nowhere."""
    tokenizer_mode: str = ""
    """vLLM's name of how prompts are made; empty, `auto` and `hf`: by the chat template."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The model that an engine found, where it is the engine that knows."""

    name: str
    source: str
    """A directory, or a model of the Hugging Face Hub; empty where it does not know."""


class Engine(Protocol):
    """Continuous batching over one model, one output message per step.

    Everything runs on the caller's event loop. `outputs` and `kv_blocks` each have one consumer.
    """

    async def start(self) -> EngineLimits:
        """Load the model; returns once requests can be submitted. Raises `EngineFailed` if it cannot be."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestRefused` for one that this engine can never serve (too long,
        unknown token, a running request of the same id), and `QueueFull`."""

    def abort(self, request_id: str) -> None:
        """Take a request back before its next step; unknown ids are ignored, because an abort may cross the
        request's own end. The request ends with one delta whose finish reason is ABORT."""

    def outputs(self) -> AsyncIterator[StepOutput]:
        """One message per engine step that brought tokens or ended requests. Ends when the engine is stopped
        and raises `EngineFailed` when it died."""

    def load(self) -> LoadReport:
        """The load as of the last step; cheap."""

    def kv_blocks(self) -> AsyncIterator[KvBlocks]:
        """Changes of the prefix cache since the engine started, in order and without gaps; a gap in the
        engine's own event stream appears as `cleared=True` followed by what is known to be there."""

    async def stop(self) -> None:
        """End all requests with ABORT and free everything, child processes included."""


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What every engine factory is given by the worker, besides the engine's own settings."""

    model_path: str
    """Directory with the tokenizer, the chat template and the weights."""
    seed: int
    """For requests that bring none; another one in each life of the worker."""
    clock: Clock
    reasoning_parser: str = ""
    """vLLM's name of how the model marks its reasoning, in which no structure is enforced; empty: it does not."""
    kv_host: str = "127.0.0.1"
    """Address that KV transfers are to listen on."""
    kv_port: int = 0
    """Port that they are to listen on; 0: a free one."""
    host_kv_bytes: int = 0
    """Memory of the host for KV blocks that leave the engine; 0: none."""
    host_kv_dir: str = ""
    disk_kv: str = ""
    """Disk for those that the host's memory has no room for, as `--disk-kv` has it; empty: none."""
    """Where it is; empty: in the machine's shared memory."""


@dataclass(frozen=True, slots=True)
class EngineFactory:
    """How an engine is made. What an entry point of the group `penstock.engines` refers to (docs/plugins.md)."""

    settings: type[Any]
    """A dataclass. `--engine-arg NAME=VALUE` sets its fields, NAME.FIELD=VALUE those of a dataclass within."""
    make: Callable[[Any, EngineContext], Engine]
    """From such settings; not started yet. Raises `ConfigurationError` for values that contradict each other."""
    defaults: Callable[[EngineContext], Mapping[str, Any]] = lambda _: {}
    """Values of fields for which no option was given, by name; fields that are not among them have their own."""
    device: Callable[[], str] = cpu_device
    """What the engine runs on, by the name that profiles are kept under. May block; called in a thread."""
    other_args: str = ""
    """The field of `settings` that takes arguments which it has no field for, as a tuple of NAME=VALUE; empty: they are
    refused."""
    needs_weights: bool = True
    """Whether the weights of a model of the Hugging Face Hub are fetched; if not, only what belongs to its text."""
    identify: Callable[[Any, Clock], Awaitable[ModelIdentity]] | None = None
    """From such settings: the model that there is, for a worker that is told none. Raises `EngineFailed` and
    `ConfigurationError`. None: a worker must be told."""
    uses_gpus: bool = False
    """Whether `penstock up` must give every instance GPUs of its own."""
