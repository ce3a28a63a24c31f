"""A mesh whose processes ask each other who they are, and strangers at each of its doors."""

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import grpc
import httpx
import msgspec
import pytest

from mesh.errors import StoreUnavailable
from mesh.identity.authority import make_identities
from mesh.identity.tls import transport_of
from mesh.rpc.client import open_channel
from mesh.run_file import RunFile
from mesh.runtime import GrpcTransport, Transport, system_runtime
from mesh.store import open_store
from penstock.v1 import member_pb2, member_pb2_grpc
from services.cli.supervisor.local_mesh import DEMO_MODELS
from services.frontend.requests.api_keys import SECRET_BYTES, new_key_line
from tests.in_time import eventually
from tests.mesh.running_mesh import PENSTOCK, RunningMesh

pytestmark = [pytest.mark.process, pytest.mark.slow]

BODY = {"model": "demo-large", "prompt": "Count from 7 up to 12.", "max_tokens": 8}


KEY, KEY_LINE = new_key_line("ops", bytes(SECRET_BYTES), is_operator=True)
OPERATOR = {"authorization": f"Bearer {KEY}"}


async def refusal(transport: Transport, address: str) -> grpc.StatusCode:
    """What a process says to somebody who orders it to restart."""
    async with open_channel(transport, address) as channel:
        stub = member_pb2_grpc.MemberStub(channel)  # type: ignore[no-untyped-call]
        try:
            await stub.Restart(member_pb2.RestartRequest(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def completion(mesh: RunningMesh) -> httpx.Response:
    """The answer of the mesh to a client."""
    async with httpx.AsyncClient(timeout=30, trust_env=False, headers=OPERATOR) as client:
        return await client.post(f"{mesh.url}/v1/completions", json=BODY)


async def acted(mesh: RunningMesh, action: dict[str, str]) -> httpx.Response:
    """What the console says to an operator, after it has looked at every process by itself."""
    async with httpx.AsyncClient(base_url=mesh.url, timeout=30, trust_env=False, headers=OPERATOR) as client:
        async with client.stream("GET", "/console/events") as looks:
            assert await anext(looks.aiter_lines())
        return await client.post("/console/actions", json=action)


def finds_no_store(member_id: str, mesh: RunningMesh) -> bool:
    """Whether a process has said so: the store does not even speak with those whom it does not know."""
    said = (line for line in mesh.output_path.read_text().splitlines() if f'"member_id": "{member_id}"' in line)
    return any("the state store cannot be reached" in line for line in said)


async def test_nobody_gets_in_without_an_identity_of_the_mesh(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY_LINE}\n")
    environment = {"PENSTOCK_SERVE_FRONTEND_API_KEYS_FILE": str(keys)}
    options = ("--engine", "simulated", "--workers", "2")
    mesh = RunningMesh(tmp_path, *options, environment=environment, asks_who=True)
    try:
        mesh.wait_until_serving()
        own = Path(tmp_path) / "penstock" / "default" / "identity"
        strangers = {
            "nobody": GrpcTransport(),
            "another mesh's operator": transport_of(
                str(make_identities(tmp_path / "strangers", "default", datetime.now(UTC))), "operator"
            ),
        }
        doors = {role["member_id"]: role["address"] for role in mesh.status()["roles"]}
        assert len(doors) == 8
        for door, address in doors.items():
            for stranger, transport in strangers.items():
                assert await refusal(transport, address) is grpc.StatusCode.UNAVAILABLE, (door, stranger)
            for role in ("worker", "frontend", "scheduler"):
                refused = await refusal(transport_of(str(own), role), address)
                assert refused is grpc.StatusCode.PERMISSION_DENIED, (door, role)
        running = msgspec.json.decode((own.parents[1] / "default.json").read_bytes(), type=RunFile)
        for transport in strangers.values():
            store = open_store(running.store_url, system_runtime(transport))
            with pytest.raises(StoreUnavailable):
                await store.put("/penstock/members/worker/rogue", b"{}", timeout_s=3)
            await store.close()
        # A rogue worker that knows the store's address does not even learn who is in the mesh.
        model = ("--model", "demo-large", "--model-path", str(DEMO_MODELS / "demo-large"))
        arguments = ("serve", "worker", "--engine", "simulated", *model, "--member-id", "rogue")
        rogue = mesh.start(*arguments, "--store", running.store_url, "--identity", str(tmp_path / "strangers"))
        try:
            eventually(lambda: finds_no_store("rogue", mesh), 60, mesh.story)
            answer = await completion(mesh)
            assert answer.status_code == 200, answer.text
            assert set(mesh.instances()) == {"demo-large-0", "demo-large-1"}
        finally:
            rogue.kill()
            rogue.wait()
        # Operators may.
        flags = mesh.cli("ca", "grpcurl").stdout.split()
        assert flags[::2] == ["-cacert", "-cert", "-key", "-servername"]
        assert mesh.cli("policy", "lmetric").returncode == 0
        done = await acted(mesh, {"action": "policy", "name": "lmetric_plus"})
        assert done.status_code == 200, done.text
        drained = mesh.cli("drain", "demo-large-1")
        assert drained.returncode == 0, drained.stderr
        eventually(lambda: "demo-large-1" not in mesh.instances(), 60, "it has been drained")
        assert (await completion(mesh)).status_code == 200
        given = json.loads(mesh.cli("audit", "--json").stdout)
        told = [(order["order"], order["who"], order["outcome"]) for order in given]
        operator = "spiffe://default/operator"
        # The console's order and that which it has the scheduler carry out end at about the same time.
        assert sorted(told) == [
            ("console", "key ops", "done"),
            ("drain", operator, "done"),
            ("policy", operator, "done"),
            ("policy", operator, "done"),
        ]
        assert mesh.stop() == 0
        assert not own.exists(), "nobody can join the next mesh with what is left of this one"
    except AssertionError as error:
        error.add_note(mesh.story())
        raise
    finally:
        mesh.cut()


def test_a_stranger_is_told_why_he_may_not_listen(tmp_path: Path) -> None:
    command = (*PENSTOCK, "serve", "monitor", "--store", "etcd://127.0.0.1:1", "--member-id", "m")
    result = subprocess.run(
        (*command, "--bind-host", "0.0.0.0"), capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert result.returncode == 2, result.stderr
    assert "say --insecure" in result.stderr
