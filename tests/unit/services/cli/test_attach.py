"""`penstock attach` and `penstock up --attach`: how servers are named, and what is told of them."""

import asyncio
import json
import sys

import pytest

from mesh.errors import ConfigurationError
from services.cli.attach import default_name
from services.cli.serve import parse_settings
from services.cli.supervisor.local_mesh import AttachedServer, LocalMesh, attached_process, parse_attached, processes
from tests.unit.engine_worker.attached.fake_server import FakeServer


def test_a_server_is_named_by_its_url_and_what_it_does_not_say() -> None:
    assert parse_attached("http://gpu-1:8000") == AttachedServer(
        "http://gpu-1:8000", "", "", ("url=http://gpu-1:8000",)
    )
    assert parse_attached("chat=http://gpu-1:8000,max_num_seqs=64,tokenizer=/models/chat") == AttachedServer(
        "http://gpu-1:8000", "chat", "/models/chat", ("url=http://gpu-1:8000", "max_num_seqs=64")
    )


@pytest.mark.parametrize("wrong", ["gpu-1:8000", "chat=gpu-1", "http://gpu-1:8000,fast"])
def test_what_is_no_server_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_attached(wrong)


def test_each_server_has_a_worker_of_its_own() -> None:
    servers = tuple(parse_attached(f"http://gpu-{number}:8000") for number in (1, 2))
    specs = processes(LocalMesh((), "vllm", (), "embedded:", "127.0.0.1", 8000, attached=servers))
    assert [spec.name for spec in specs if spec.role == "worker"] == ["attached-0", "attached-1"]


def test_the_worker_is_told_what_the_operator_said() -> None:
    server = parse_attached("http://gpu-1:8000", model="chat", more=("kv_events=tcp://gpu-1:5557",))
    spec = attached_process(server, "a", "penstock://127.0.0.1:1", 30.0)
    common, settings = parse_settings("worker", spec.arguments)
    assert (common.member_id, settings.engine, settings.model, settings.model_path) == ("a", "attached", "chat", "")
    assert settings.engine_arg == ("url=http://gpu-1:8000", "kv_events=tcp://gpu-1:5557")


def test_the_default_name_is_that_of_the_servers_address() -> None:
    assert default_name("http://gpu-1.example:8000/v1") == "attached-gpu-1.example-8000"
    assert default_name("http://[::1]:8000") == "attached-1-8000"


@pytest.mark.process
async def test_a_check_tells_what_the_server_is() -> None:
    async with FakeServer(name="/models/chat") as server:
        command = (sys.executable, "-m", "services.cli.main", "attach", server.url, "--check", "--json")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    told = json.loads(output)
    assert told["model"]["name"] == "/models/chat"
    assert told["abilities"] == {"is_vllm": True, "takes_tokens": True, "tells_tokens": True}
    assert told["limits"]["label"] == "attached-vllm"
    assert any("kv-events-config" in paragraph for paragraph in told["advice"])
