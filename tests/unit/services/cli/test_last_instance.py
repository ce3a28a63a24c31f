"""The last instance of a tier has no peer to move its requests to: it gets the time to finish them."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import request_pb2, worker_pb2_grpc
from services.cli.supervisor.launcher import SystemLauncher
from services.cli.supervisor.local_mesh import DEMO_MODELS, DRAIN_S, LocalMesh, ModelSpec, worker_process
from services.cli.supervisor.supervisor import KILL_AFTER_S, Supervisor
from tests.unit.engine_worker.worker.running_worker import FrontendStream

MODEL = "demo-small"
SLOW = ("instance.kv_blocks=600", "cost.fixed_ms=20", "time_scale=1.0")
"""A hundred tokens take two seconds."""
TOKENS = 100
WAIT_S = 30.0


async def address_of(log_path: Path) -> str:
    """Where the worker serves, from its log."""
    async with asyncio.timeout(WAIT_S):
        while True:
            for line in log_path.read_text().splitlines() if log_path.exists() else ():
                if '"message": "serving"' in line:
                    return str(json.loads(line)["address"])
            await asyncio.sleep(0.02)


@pytest.mark.process
@pytest.mark.parametrize(("drain_s", "is_cut"), [(DRAIN_S, False), (0.2, True)])
async def test_what_runs_on_it_is_cut_by_nothing_but_the_time_that_the_mesh_gives_it(
    tmp_path: Path, drain_s: float, is_cut: bool
) -> None:
    spec = ModelSpec(MODEL, DEMO_MODELS / MODEL, 1)
    mesh = LocalMesh((spec,), "simulated", SLOW, "embedded:", "127.0.0.1", 8000, drain_s=drain_s)
    supervisor = Supervisor(SystemLauncher(tmp_path), lambda _: None)
    try:
        await supervisor.add(worker_process(mesh, MODEL, "last", (1, 1)))
        async with open_channel(GrpcTransport(), await address_of(tmp_path / "last.log")) as channel:
            stream = FrontendStream(worker_pb2_grpc.WorkerStub(channel).Stream())  # type: ignore[no-untyped-call]
            await stream.hello()
            sampling = request_pb2.SamplingParams(max_tokens=TOKENS, top_p=1, repetition_penalty=1, ignore_eos=True)
            await stream.generate("a", model=MODEL, sampling=sampling)
            delta = await stream.only_delta()
            removed = asyncio.create_task(supervisor.remove("last", drain_s + KILL_AFTER_S))
            tokens = len(delta.token_ids)
            while not delta.finish_reason:
                delta = await stream.only_delta()
                tokens += len(delta.token_ids)
            assert (delta.error.code == request_pb2.ERROR_CODE_UNAVAILABLE) is is_cut
            assert (tokens < TOKENS) is is_cut
            assert await stream.read() is grpc.aio.EOF
            await asyncio.wait_for(removed, WAIT_S)
    finally:
        supervisor.kill()
        await supervisor.stop()
