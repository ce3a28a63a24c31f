"""The two servers that are compared: vLLM as it is installed, and a mesh of one instance, with the same settings."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from tests.conformance.made_models import LOADED, MODELS, make_adapted, make_toolless, make_unmarked
from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh, free_port
from tests.vllm.deciding_model import make_decider
from tests.vllm.other_tokenizers import make_tekken, make_tiktoken
from tests.vllm.thinking_model import SWITCH, make_thinker
from tests.vllm.tiny_bert import make_tiny_bert
from tests.vllm.tiny_images import make_tiny_idefics

START_S = 600.0
STOP_S = 60.0
LOADS_ADAPTERS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
STOCK_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # the mesh keeps responses by itself
    **LOADS_ADAPTERS,
}
STOCK_ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--gpu-memory-utilization", "0.1")

PROMPT_DETAILS = ("--enable-prompt-tokens-details",)
NO_ANY_WHITESPACE = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')
"""What `penstock up` sets: the demo models write blanks without end otherwise."""


@dataclass(frozen=True)
class Served:
    """A model, and how both servers are started with it."""

    model: str | Callable[[Path], object]
    """A demo model, or what writes one into a folder."""
    stock: tuple[str, ...]
    mesh: tuple[str, ...]

    def path(self, run_dir: Path) -> Path:
        """Where it is, made now if it is not there."""
        if isinstance(self.model, str):
            return MODELS / self.model
        path = run_dir / "model"
        if not path.exists():
            self.model(path)
        return path


def _pooling(convert: str, task: str = "", **overrides: Any) -> Served:
    """demo-small converted to a pooling model."""
    stock, mesh = ["--runner", "pooling", "--convert", convert], ["runner=pooling", f"convert={convert}"]
    if overrides:
        stock += ["--hf-overrides", json.dumps(overrides)]
        mesh += [f"hf_overrides={json.dumps(overrides)}"]
    if task:
        stock += ["--pooler-config", json.dumps({"task": task})]
        mesh += [f"pooler_config.task={task}"]
    return Served("demo-small", tuple(stock), tuple(word for each in mesh for word in ("--engine-arg", each)))


SERVED: Mapping[str, Served] = MappingProxyType(
    {
        "demo-large": Served(
            "demo-large",
            ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", *PROMPT_DETAILS, *NO_ANY_WHITESPACE),
            ("--tool-call-parser", "hermes"),
        ),
        "unmarked": Served(
            make_unmarked,
            ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", *PROMPT_DETAILS, *NO_ANY_WHITESPACE),
            (
                *("--tool-call-parser", "hermes"),
                *("--engine-arg", "structured_outputs_config.backend=xgrammar"),
                *("--engine-arg", "structured_outputs_config.disable_any_whitespace=true"),
            ),
        ),
        "thinks": Served(
            partial(make_thinker, switch=SWITCH),
            ("--reasoning-parser", "qwen3", *PROMPT_DETAILS),
            ("--reasoning-parser", "qwen3"),
        ),
        "written": Served(
            "demo-large",
            ("--tokenizer-mode", "deepseek_v32", *PROMPT_DETAILS, *NO_ANY_WHITESPACE),
            ("--engine-arg", "tokenizer_mode=deepseek_v32"),
        ),
        "toolless": Served(
            make_toolless,
            ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", *PROMPT_DETAILS),
            ("--tool-call-parser", "hermes"),
        ),
        "adapted": Served(
            make_adapted,
            (*PROMPT_DETAILS, "--enable-lora", "--max-loras", "2", "--lora-modules", f"{LOADED}={LOADED}"),
            tuple(
                word
                for each in ("enable_lora=true", "max_loras=2", f"lora_modules={LOADED}={LOADED}")
                for word in ("--engine-arg", each)
            ),
        ),
        "tekken": Served(
            make_tekken,
            (
                "--tokenizer-mode",
                "mistral",
                "--enable-auto-tool-choice",
                "--tool-call-parser",
                "mistral",
                *PROMPT_DETAILS,
            ),
            ("--engine-arg", "tokenizer_mode=mistral", "--tool-call-parser", "mistral"),
        ),
        "tiktoken": Served(
            make_tiktoken,
            ("--trust-remote-code", *PROMPT_DETAILS),
            ("--engine-arg", "trust_remote_code=true"),
        ),
        "decides": Served(make_decider, PROMPT_DETAILS, ()),
        "eyes": Served(make_tiny_idefics, PROMPT_DETAILS, ()),
        "vectors": _pooling("embed"),
        "tokens": _pooling("embed", "token_embed"),
        # As the rerankers that a language model was made into: the scores come from the logits of these tokens.
        "ranks": _pooling("classify", classifier_from_token=["0", "1"], method="from_2_way_softmax"),
        "pairs": Served(make_tiny_bert, ("--runner", "pooling"), ("--engine-arg", "runner=pooling")),
        "classes": _pooling("classify", classifier_from_token=["0", "1", "2"], method="no_post_processing"),
    }
)
"""By the name that clients ask for."""


@contextmanager
def stock_server(name: str, run_dir: Path) -> Iterator[str]:
    """The address of `vllm serve` of the installed vLLM, with one of the models."""
    served = SERVED[name]
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log_path = run_dir / "stock.log"
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(served.path(run_dir)))
    settings = ("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), *STOCK_ARGUMENTS)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            (*command, *settings, *served.stock),
            env={**os.environ, **STOCK_ENVIRONMENT},
            cwd=run_dir,
            stdout=log,
            stderr=log,
        )

    def serves() -> bool:
        assert process.poll() is None, f"vLLM ended: {log_path.read_text()[-3000:]}"
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        eventually(serves, START_S, "the stock server serves")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


@contextmanager
def mesh_of_one(name: str, run_dir: Path) -> Iterator[str]:
    """The address of `penstock up` with one instance of vLLM, with one of the models."""
    served = SERVED[name]
    model = f"{name}={served.path(run_dir)}:1"
    settings = ("--engine-arg", "dtype=float32", "--ready-timeout-s", str(START_S))
    mesh = RunningMesh(run_dir, "--model", model, *settings, *served.mesh, environment=LOADS_ADAPTERS, cwd=run_dir)
    try:
        mesh.wait_until_serving(START_S)
        yield mesh.url
        mesh.stop()
    finally:
        mesh.cut()
