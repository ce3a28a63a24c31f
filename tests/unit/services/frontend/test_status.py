import asyncio
from pathlib import Path

import grpc
import pytest

from penstock.v1 import frontend_pb2, frontend_pb2_grpc
from tests.unit.services.frontend.fakes import tokens
from tests.unit.services.frontend.mesh_of_fakes import mesh_of_fakes

pytestmark = pytest.mark.live


async def test_the_side_door_shows_connections_and_requests(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1])) as mesh:
        answer = await mesh.client().completions.create(model="demo", prompt="x")
        assert answer.choices[0].text
        async with grpc.aio.insecure_channel(mesh.rpc_address) as channel:
            stub = frontend_pb2_grpc.FrontendStub(channel)  # type: ignore[no-untyped-call]
            status = await stub.GetStatus(frontend_pb2.GetFrontendStatusRequest())
            assert (status.requests_total, status.active_requests, list(status.models)) == (1, 0, ["demo"])
            assert [(worker.instance_id, worker.connected) for worker in status.workers] == [("worker-0", True)]
            mesh.worker.script = lambda _: []
            asking = asyncio.create_task(mesh.client().completions.create(model="demo", prompt="xyz", n=2))
            await mesh.worker.wait_until(lambda: len(mesh.worker.received) == 3)
            listed = await stub.ListRequests(frontend_pb2.ListFrontendRequestsRequest())
            assert [one.instance_id for one in listed.requests] == ["worker-0"] * 2
            assert {one.prompt_tokens for one in listed.requests} == {1 + len(mesh.ids("xyz"))}
            asking.cancel()


async def test_an_endpoint_that_is_open_on_all_addresses_is_announced_where_others_reach_it(model_path: Path) -> None:
    async with mesh_of_fakes(model_path, lambda _: tokens([70], [1]), http_host="0.0.0.0") as mesh:
        assert mesh.url.startswith("http://127.0.0.1:"), "as the member's own address"
        assert (await mesh.client().completions.create(model="demo", prompt="x")).choices[0].text
