"""Settings of the worker role."""

from dataclasses import dataclass
from typing import Literal

from controlplane.protocols.bouncing import SLACK_TOKENS

PhaseName = Literal["any", "prefill", "decode"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker serves one model with one engine."""

    model: str
    """Name of the model that clients use; empty with an attached engine: what the server calls it."""
    model_path: str
    """Directory with the tokenizer, the chat template and (for vllm) the weights, or a model of the Hugging Face Hub,
    such as Qwen/Qwen3-0.6B; empty with an attached engine: where the server says that it has it from."""
    engine: str = "vllm"
    """Which engine runs the model: vllm, simulated, attached (a server that runs already), or one of an installed
    package (see `penstock plugins`)."""
    engine_arg: tuple[str, ...] = ()
    """An argument of the engine itself as NAME=VALUE, for vllm any of its engine arguments; may be given many times."""
    generation_config: str = "auto"
    """Where sampling parameters come from that a request leaves out: auto (the model's generation_config.json), vllm
    (vLLM's neutral ones), or a directory that holds such a file."""
    override_generation_config: str = ""
    """A JSON object that is put over them, such as {"temperature": 0.5}."""
    tool_call_parser: str = ""
    """vLLM's name of the form in which the model calls tools, such as hermes. Without it a model calls them only where
    a request makes it."""
    enable_auto_tool_choice: bool = True
    """Let the model decide whether to call tools, which takes --tool-call-parser."""
    reasoning_parser: str = ""
    """vLLM's name of how the model marks its reasoning, such as qwen3, which is told apart from its answer."""
    kv_host: str = ""
    """Address that KV transfers listen on, 0.0.0.0 or :: for all; empty: what --bind-host says."""
    kv_port: int = 0
    """Port of KV transfers; their data comes in on the one above. 0 takes free ones."""
    host_kv: str = ""
    """Memory of the host in which KV blocks stay that have left the engine, such as 8GiB: one store, shared by the
    instances of a model there; empty: none."""
    host_kv_dir: str = ""
    """Where that memory is: a directory that only this user may use; empty: one of this user's in /dev/shm."""
    disk_kv: str = ""
    """Space on disk for KV blocks that the memory of the host has no room for, such as 200GiB or 200GiB:/var/tmp/kv
    with its directory; takes --host-kv. Empty: none."""
    prefix_pull: bool = True
    """Pull cached prefixes of prompts from other instances where that is sooner than computing them, and let others
    pull from here."""
    phase: PhaseName = "any"
    """What the instance is for; prefill and decode only where no other instance can do the other phase."""
    predict_every_steps: int = 20
    """The remaining lengths of running requests are predicted at every so many engine steps; 0: never."""
    predict_deadline_ms: int = 500
    """What the length predictor is given to answer; the engine goes on meanwhile."""
    report_interval_ms: int = 50
    """Load is reported after an engine step, but no more often than this."""
    heartbeat_ms: int = 500
    """An idle worker reports its load this often, so that a hang is not mistaken for idleness."""
    hang_s: float = 5.0
    """An engine that has requests and makes no step for this long counts as hung."""
    bounce_tokens: int = SLACK_TOKENS
    """A new request is given back, to be placed again, if more prompt tokens than these wait here beyond what was
    believed when it was placed, as where several schedulers choose the same instance at once; 0: never."""
    max_requests: int = 1024
    """Requests inside the engine, waiting ones included; more are answered UNAVAILABLE."""
    orphan_s: float = 10.0
    """How long a request runs on after its frontend was lost, and its last tokens are kept after its end, for a client
    that comes back by another frontend; 0: not at all."""
    max_orphans: int = 256
    """Requests that run on so at once."""
    max_streams: int = 64
    """Frontends at once."""
    stream_buffer_messages: int = 1024
    """Steps that a frontend may lag behind before it is cut off."""
    stream_buffer_bytes: int = 16 * 1024 * 1024
    """Bytes that a frontend may lag behind before it is cut off."""
