"""How each router is started, with four engines that make tokens of nothing."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

from benchmarks.identity_cpu import roles_of
from benchmarks.peers.workload import MODEL
from mesh.errors import PeerUnavailable
from tests.mesh.running_mesh import RunningMesh, free_port

ENGINES: Final = 4
READY_S: Final = 120.0
_HERE: Final = Path(__file__).resolve().parent
_NO_COST: Final = ("prefill_token_ms", "decode_request_ms", "context_token_ms", "attended_pair_ms")


@dataclass(frozen=True, slots=True)
class Router:
    """One that runs."""

    url: str
    pids: Mapping[str, Sequence[int]]
    """Of what counts as the router, by role. Engines do not."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What routers are started with."""

    folder: Path
    """For their files."""
    checkpoint: Path
    """Configuration and tokenizer of the model."""
    venvs: Path
    """Holds a virtual environment for each peer, by its name."""
    step_ms: float


@contextmanager
def penstock(setting: Setting) -> Iterator[Router]:
    """`penstock up`, with its default policy. Without identities, as the others have none on a loopback."""
    cost = [f"cost.fixed_ms={setting.step_ms}", *(f"cost.{name}=0" for name in _NO_COST)]
    room = ("instance.max_model_len_tokens=65536", "instance.kv_blocks=65536")
    options = [word for option in (*cost, *room) for word in ("--engine-arg", option)]
    model = ("--model", f"{MODEL}={setting.checkpoint}:{ENGINES}")
    mesh = RunningMesh(setting.folder, "--engine", "simulated", *model, *options)
    try:
        mesh.wait_until_serving(READY_S)
        roles = roles_of(mesh)
        yield Router(mesh.url, {role: roles[role] for role in ("frontend", "scheduler", "monitor")})
    finally:
        mesh.stop()


@contextmanager
def smg(setting: Setting) -> Iterator[Router]:
    """SMG, which renders, tokenizes and detokenizes where its engines speak gRPC."""
    bin_path = setting.venvs / "smg" / "bin"
    ports = [free_port() for _ in range(ENGINES)]
    engines = (str(bin_path / "python"), str(_HERE / "smg_engine.py"), MODEL, str(setting.checkpoint))
    port, metrics_port = free_port(), free_port()
    command = [str(bin_path / "smg"), "launch", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warn"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port), "--policy", "cache_aware"]
    command += ["--model-path", str(setting.checkpoint), "--worker-urls"]
    with ExitStack() as stack:
        stack.enter_context(running((*engines, str(setting.step_ms), *map(str, ports)), setting, "smg-engines"))
        urls = [f"grpc://127.0.0.1:{each}" for each in ports]
        process = stack.enter_context(running((*command, *urls), setting, "smg"))
        yield Router(f"http://127.0.0.1:{port}", {"router": [process.pid]})


@contextmanager
def dynamo(setting: Setting) -> Iterator[Router]:
    """Dynamo's frontend with its KV router, found by files, over TCP: it needs neither etcd nor NATS."""
    python, port = str(setting.venvs / "dynamo" / "bin" / "python"), free_port()
    local = ("TCP_RPC_HOST", "TCP_RESPONSE_STREAM_HOST", "EVENT_PLANE_HOST")
    environment = {
        "DYN_FILE_KV": str(setting.folder / "dynamo-store"),
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_LOG": "warn",
        "DYN_SELF_HOST_METADATA": "0",
        "HF_HUB_OFFLINE": "1",
        **{f"DYN_{name}": "127.0.0.1" for name in local},
    }
    engine = (python, str(_HERE / "dynamo_engine.py"), MODEL, str(setting.checkpoint), str(setting.step_ms))
    frontend = (python, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port))
    with ExitStack() as stack:
        for number in range(ENGINES):
            stack.enter_context(running(engine, setting, f"dynamo-engine-{number}", environment))
        mode = ("--router-mode", "kv", "--no-router-kv-events")
        process = stack.enter_context(running((*frontend, *mode), setting, "dynamo", environment))
        yield Router(f"http://127.0.0.1:{port}", {"router": [process.pid]})


ROUTERS: Final[Mapping[str, Callable[[Setting], AbstractContextManager[Router]]]] = {
    "penstock": penstock,
    "smg": smg,
    "dynamo": dynamo,
}


@contextmanager
def running(
    command: Sequence[str], setting: Setting, name: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process and what it starts, ended with the block. Its output is in the folder."""
    with (setting.folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_until_answering(router: Router, name: str, folder: Path) -> None:
    """Return once it has answered a chat. Raises PeerUnavailable, with its last words."""
    deadline_s = time.monotonic() + READY_S
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    answer = "nothing"
    while time.monotonic() < deadline_s:
        try:
            got = httpx.post(f"{router.url}/v1/chat/completions", json=body, timeout=10, trust_env=False)
        except httpx.HTTPError as error:
            answer = repr(error)
        else:
            if got.status_code == 200:
                return
            answer = f"{got.status_code} {got.text[:200]}"
        time.sleep(0.2)
    said = (folder / f"{name}.log").read_text(errors="replace")[-2000:] if name != "penstock" else ""
    raise PeerUnavailable(f"{name} does not answer within {READY_S:g} s, but {answer}. Its output ends:\n{said}")
