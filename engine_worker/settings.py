"""Settings of the worker role."""

from dataclasses import dataclass
from typing import Literal

PhaseName = Literal["any", "prefill", "decode"]
ToolParserName = Literal["hermes", "llama3_json", "llama4_json", "qwen3_coder", "qwen3_xml"]
ReasoningParserName = Literal["deepseek_r1", "qwen3"]


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker serves one model with one engine."""

    model: str
    """Name of the model that clients use."""
    model_path: str
    """Directory with the tokenizer, the chat template and (for vllm) the weights, or a model of the Hugging Face Hub,
    such as Qwen/Qwen3-0.6B."""
    engine: str = "vllm"
    """Which engine runs the model: vllm, simulated, or one of an installed package (see `penstock plugins`)."""
    engine_arg: tuple[str, ...] = ()
    """An argument of the engine itself as NAME=VALUE, for vllm any of its engine arguments; may be given many times."""
    generation_config: str = "auto"
    """Where sampling parameters come from that a request leaves out: auto (the model's generation_config.json), vllm
    (vLLM's neutral ones), or a directory that holds such a file."""
    override_generation_config: str = ""
    """A JSON object that is put over them, such as {"temperature": 0.5}."""
    tool_call_parser: ToolParserName | None = None
    """vLLM's name of the form in which the model calls tools. Without it a model calls them only where a request makes
    it."""
    enable_auto_tool_choice: bool = True
    """Let the model decide whether to call tools, which takes --tool-call-parser."""
    reasoning_parser: ReasoningParserName | None = None
    """vLLM's name of how the model marks its reasoning, which is told apart from its answer."""
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
