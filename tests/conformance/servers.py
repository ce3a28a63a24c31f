"""The two servers that are compared: vLLM as it is installed, and a mesh of one instance, with the same settings."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.in_time import eventually
from tests.mesh.running_mesh import RunningMesh, free_port

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-large"
START_S = 600.0
STOP_S = 60.0
STOCK_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_RESPONSES_API_STORE": "1",  # the mesh keeps responses by itself
}
STOCK_ARGUMENTS = (
    *(
        "--served-model-name",
        "demo-large",
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        "32",
        "--gpu-memory-utilization",
        "0.1",
    ),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details"),
    # What `penstock up` sets: the demo models write blanks without end otherwise.
    *("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}'),
)
MESH_ARGUMENTS = ("--model", "demo-large:1", "--engine-arg", "dtype=float32", "--tool-call-parser", "hermes")


@contextmanager
def stock_server(run_dir: Path) -> Iterator[str]:
    """The address of `vllm serve` of the installed vLLM."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log_path = run_dir / "stock.log"
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--host", "127.0.0.1")
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            (*command, "--port", str(port), *STOCK_ARGUMENTS),
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
def mesh_of_one(run_dir: Path) -> Iterator[str]:
    """The address of `penstock up` with one instance of vLLM."""
    mesh = RunningMesh(run_dir, *MESH_ARGUMENTS, "--ready-timeout-s", str(START_S))
    try:
        mesh.wait_until_serving(START_S)
        yield mesh.url
        mesh.stop()
    finally:
        mesh.cut()
