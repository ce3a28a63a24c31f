"""Settings of a vLLM engine (`--engine-arg`)."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """One engine on one machine. What vLLM knows has vLLM's name; everything that is None is left to vLLM or to the
    device."""

    model_path: str
    """Directory of a checkpoint in Hugging Face format; nothing is ever downloaded."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """pooling: vectors and scores of prompts instead of answers. auto serves no pooling model: say so."""
    dtype: Dtype = "auto"
    """float32 makes the output of a request independent of who shares its batch; the others do not."""
    block_size: int = 32
    """Tokens of one KV block. vLLM's CPU kernels want a multiple of 32."""
    max_model_len: int | None = None
    """Prompt and output together; None: what the model was made for."""
    max_num_seqs: int = 32
    """Requests that one step may serve."""
    max_queued_requests: int = 1024
    """Requests that may wait beyond that; more are refused."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step; longer prompts are prefilled in chunks."""
    max_logprobs: int = 20
    """Most likely tokens that a request may ask logprobs of."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache. None: on a GPU what `gpu_memory_utilization` leaves, on a CPU 256 MiB."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights, activations and KV cache; ignored on a CPU."""
    tensor_parallel_size: int = 1
    """GPUs (or CPU processes) that share the model."""
    pipeline_parallel_size: int = 1
    """Groups of GPUs that each hold a part of the layers."""
    data_parallel_size: int = 1
    """Engine cores that each have a copy of the model, and KV of their own; each on `tensor_parallel_size` times
    `pipeline_parallel_size` GPUs."""
    enforce_eager: bool | None = None
    """Neither compile the model nor capture CUDA graphs. None: True on a CPU, where compiling takes minutes."""
    cpu_threads: int = 1
    """OpenMP threads of a step on a CPU; instances that share a machine should share its cores."""
    cpu_niceness: int = 19
    """Of the engine core's processes on a CPU: they give way to those that route, stream and renew leases, which need
    little, but at once. With less than this they do not: two busy engines of 5 on two cores, and the frontend's threads
    waited 0.3 to 1.1 s of each second for a core, so that leases were lost (Linux 6.18). With 19 nobody waited, and the
    engines computed as much."""
    seed: int = 0
    """Of requests that bring none. Two engines of one seed draw alike, so give each instance its own."""
    structured_outputs: bool | None = None
    """Serve requests whose answers must fit a schema, a grammar or the like. Takes a tokenizer in the engine: without
    it the engine starts sooner and needs less memory. None: if the checkpoint has one."""
    reasoning_parser: str = ""
    """vLLM's name of how the model marks its reasoning, in which no structure is enforced; by default the worker's."""
    lora_modules: str = ""
    """LoRA adapters to begin with, NAME=PATH,NAME=PATH; takes enable_lora=true, one of vLLM's own arguments, as
    max_loras, max_cpu_loras and max_lora_rank are."""
    movable: bool = True
    """Let requests move to and from other workers. Without UCX, or with KV that cannot move block by block, the engine
    says so and runs without."""
    kv_host: str = "127.0.0.1"
    """Address that the KV transfer agent listens on; by default the worker's."""
    kv_port: int = 0
    """The agent's port; by default the worker's."""
    host_kv_bytes: int = 0
    """Of the store of KV blocks in its host's memory; by default the worker's, `--host-kv`."""
    host_kv_dir: str = ""
    """Where that is; by default the worker's."""
    disk_kv: str = ""
    """The store on disk behind it; by default the worker's, `--disk-kv`."""
    stop_timeout_s: float = 5.0
    """How long the engine core may take to leave before it is killed."""
    others: tuple[str, ...] = ()
    """NAME=VALUE of vLLM's other engine arguments, not checked yet: its own parser does (see `arguments`)."""
