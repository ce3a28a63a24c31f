"""A stock `vllm serve` in a mesh, beside an own instance of vLLM: answered, explained, killed under 16 streams."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_worker.engines.attached.advice import kv_transfer_config
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS
from services.cli.supervisor.local_mesh import DEMO_MODELS
from tests.in_time import eventually, still
from tests.mesh.reader import Reader
from tests.mesh.running_mesh import RunningMesh, free_port
from tests.mesh.test_attach import ROUNDS, Stream, any_placed_last

pytestmark = pytest.mark.vllm

MODEL = "demo-small"
STREAMS = 16
BODY = {"model": MODEL, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
ALIKE = {"dtype": "float32", "max_model_len": "2048", "block_size": "32"}
"""So that both instances say the same, whoever shares their batch."""
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}

IN_ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What a server on a CPU needs besides for its requests to move, and for predictions."""


@contextmanager
def vllm_serve(
    folder: Path,
    port: int,
    events: int,
    replay: int,
    options: Mapping[str, str] = MappingProxyType(ALIKE),
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[subprocess.Popen[bytes]]:
    """vLLM's own server, as operators start it, telling of its prefix cache."""
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(DEMO_MODELS / MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--enforce-eager"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command += ["--enable-prefix-caching", "--kv-events-config", json.dumps(config)]
    # An own engine in this process has left word there for children of its own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "VLLM_"))}
    with (folder / f"vllm-{port}.log").open("wb") as output:
        # Not from the source tree: a plain server has none of Penstock's own code beside it.
        process = subprocess.Popen(
            command,
            env={**inherited, **ENVIRONMENT, **environment},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill(process)


def kill(process: "subprocess.Popen[bytes]") -> None:
    """The server and its engine core at once, as a machine that is gone."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        return
    process.wait(30)


async def test_a_stock_server_is_answered_explained_and_killed_without_a_wrong_token(tmp_path: Path) -> None:
    port, events, replay = free_port(), free_port(), free_port()
    with vllm_serve(tmp_path, port, events, replay) as server:
        url = f"http://127.0.0.1:{port}"
        arguments = [part for name, value in ALIKE.items() for part in ("--engine-arg", f"{name}={value}")]
        about = (
            f"{url},kv_events=tcp://127.0.0.1:{events},kv_replay=tcp://127.0.0.1:{replay},max_num_seqs=64,start_s=400"
        )
        mesh = RunningMesh(tmp_path, "--model", f"{MODEL}:1", *arguments, "--attach", about, "--ready-timeout-s", "500")
        try:
            await asyncio.to_thread(mesh.wait_until_serving, 500)
            kinds = {
                each["instance_id"]: each["engine"] for each in (await asyncio.to_thread(mesh.status))["instances"]
            }
            assert kinds == {"attached-0": "attached-vllm", f"{MODEL}-0": "vllm"}
            prompts = [f"Sort {number} {number * 7 % 23} {number * 5 % 19} and count on." for number in range(STREAMS)]
            async with httpx.AsyncClient(base_url=mesh.url, timeout=240) as client:
                for _ in range(ROUNDS):
                    whole = [Stream(prompt, BODY) for prompt in prompts]
                    await asyncio.gather(*(stream.run(client) for stream in whole))
                    answered = [each for each in whole if each.instance == "attached-0"]
                    is_used = len(answered) < STREAMS and await any_placed_last(mesh, answered, "attached-0")
                    if is_used:
                        break
                still(is_used, "the server and the instance answered some each")
                page = (await client.get("/metrics")).text
                for name in ("iteration_tokens_total_count", "request_queue_time_seconds_count"):
                    counts = counts_by_member(page, f"vllm:{name}")
                    assert counts.keys() == set(kinds), "own engines say it, and what the server says is passed on"
                    assert min(counts.values()) > 0
                await asyncio.to_thread(eventually, lambda: cached_at(mesh, "attached-0") > 0, 10, "its cache is known")

                broken = [Stream(prompt, BODY) for prompt in prompts]
                running = [asyncio.create_task(stream.run(client)) for stream in broken]
                # As soon as one is under way there: a busy machine puts many tokens into each chunk.
                while not any(each.instance == "attached-0" and each.chunks for each in broken):
                    still(not all(each.done() for each in running), "a stream is under way at the server")
                    await asyncio.sleep(0.01)
                kill(server)
                await asyncio.gather(*running)
            struck = [stream for stream in broken if stream.instance == "attached-0"]
            assert struck, "some were at the server"
            print(f"{len(struck)} of {STREAMS} streams were at the server that was killed")
            assert [stream.text for stream in broken] == [stream.text for stream in whole]
            assert {stream.finish_reason for stream in broken} == {"length"}
            still(await any_placed_last(mesh, struck, f"{MODEL}-0"), "a stream was under way at it when it was killed")
            assert await asyncio.to_thread(mesh.stop) == 0
        finally:
            mesh.cut()


def counts_by_member(page: str, name: str) -> dict[str, float]:
    """The samples of one name."""
    samples = (each for family in text_string_to_metric_families(page) for each in family.samples)
    return {each.labels["member_id"]: each.value for each in samples if each.name == name}


def cached_at(mesh: RunningMesh, instance_id: str) -> int:
    """Blocks that the prefix index has of an instance."""
    (found,) = (each for each in mesh.status()["instances"] if each["instance_id"] == instance_id)
    return int(found.get("cached_blocks", 0))


def test_requests_of_a_server_with_our_connector_move_by_command(tmp_path: Path) -> None:
    port, events, replay, control = free_port(), free_port(), free_port(), f"ipc://{tmp_path}/control"
    ours = {"kv-transfer-config": kv_transfer_config(control), "worker-extension-cls": EXTENSION_CLASS}
    with vllm_serve(tmp_path, port, events, replay, {**ALIKE, **ours}, IN_ONE_PROCESS):
        arguments = [part for name, value in ALIKE.items() for part in ("--engine-arg", f"{name}={value}")]
        about = f"http://127.0.0.1:{port},kv_events=tcp://127.0.0.1:{events},kv_replay=tcp://127.0.0.1:{replay}"
        about += f",max_num_seqs=64,start_s=400,control={control}"
        mesh = RunningMesh(tmp_path, "--model", f"{MODEL}:1", *arguments, "--attach", about, "--ready-timeout-s", "500")
        try:
            mesh.wait_until_serving(500)
            prompts = [f"Sort {number} {number * 7 % 23} {number * 5 % 19} and count on." for number in range(8)]
            texts = [reader.whole_text() for reader in [begun(mesh, prompt) for prompt in prompts]]
            other = {"attached-0": f"{MODEL}-0", f"{MODEL}-0": "attached-0"}
            moved: set[str] = set()
            refused: list[str] = []
            readers: list[Reader] = []
            for prompt in prompts:
                readers.append(begun(mesh, prompt))
                source = readers[-1].instance
                # At once, there and back: 800 tokens of so small a model are over in two seconds.
                for target in (other[source], source):
                    answer = mesh.cli("migrate", readers[-1].request_id, "--to", target, "--json")
                    if answer.returncode == 0:
                        moved.add(target)
                    else:
                        refused.append(f"to {target}: {answer.stdout} {answer.stderr}")
            assert [reader.whole_text() for reader in readers] == texts
            late = all("runs on no instance" in why for why in refused)
            still(moved == set(other) or not late, "a request runs until it has moved each way")
            assert moved == set(other), "\n".join(refused)
            assert mesh.stop() == 0
        finally:
            mesh.cut()


def begun(mesh: RunningMesh, prompt: str) -> Reader:
    return Reader(mesh, prompt, tokens=800, model=MODEL)
