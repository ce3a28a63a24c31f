"""A worker and a length predictor in one mesh: from hidden states to what the worker tells of its requests."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.role import WorkerRole
from engine_worker.settings import WorkerSettings
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import predictor_pb2, predictor_pb2_grpc, worker_pb2, worker_pb2_grpc
from services.predictor.role import PredictorRole
from services.predictor.settings import PredictorSettings
from tests.unit.controlplane.local_mesh import LocalMesh, local_mesh
from tests.unit.engine_worker.prediction.state_engine import StateEngine
from tests.unit.engine_worker.worker.running_worker import FrontendStream
from tests.unit.services.predictor.artefacts import HIDDEN_SIZE, make_artefact, make_network

pytestmark = pytest.mark.live


class Worker:
    """One that runs, asked over gRPC."""

    def __init__(self, engine: StateEngine, channel: Any) -> None:
        self.engine = engine
        self._worker = worker_pb2_grpc.WorkerStub(channel)
        self._prediction = predictor_pb2_grpc.LengthPredictionStub(channel)
        self.stream = FrontendStream(self._worker.Stream())

    async def prediction(self) -> Any:
        return await self._prediction.GetState(predictor_pb2.GetPredictionStateRequest())

    async def remaining(self) -> dict[str, int | None]:
        listing = await self._worker.ListRequests(worker_pb2.ListRequestsRequest())
        return {
            request.request_id: request.remaining_tokens if request.HasField("remaining_tokens") else None
            for request in listing.requests
        }

    async def until(self, condition: Callable[[Any], bool]) -> Any:
        """The prediction's state once it is such."""
        while not condition(state := await self.prediction()):  # noqa: ASYNC110  an RPC is all there is
            await asyncio.sleep(0.01)
        return state


@asynccontextmanager
async def worker_in(mesh: LocalMesh, model_path: Path) -> AsyncIterator[Worker]:
    engine = StateEngine(width=HIDDEN_SIZE)
    settings = WorkerSettings(model="m", model_path=str(model_path), engine="simulated")
    running = await mesh.start(WorkerRole(settings, lambda _settings, _seed, _clock: engine), "worker-0")
    async with open_channel(GrpcTransport(), running.address) as channel:
        worker = Worker(engine, channel)
        await worker.stream.hello()
        yield worker


def checkpoint(path: Path) -> str:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    return checkpoint_fingerprint(path)


async def test_states_become_remaining_lengths(tmp_path: Path) -> None:
    fingerprint = checkpoint(tmp_path / "model")
    make_artefact(tmp_path / "artefact", fingerprint=fingerprint)
    async with local_mesh() as mesh:
        settings = PredictorSettings(artefact=(tmp_path / "artefact",), artefact_poll_s=0.01, learn=False)
        await mesh.start(PredictorRole(settings), "predictor-0")
        async with worker_in(mesh, tmp_path / "model") as worker:
            assert worker.engine.every_steps == 20
            await worker.until(lambda state: state.source == "llm_native")
            await worker.stream.generate("a")
            await worker.until(lambda _: "a" in worker.engine.requests)
            worker.engine.step()
            await worker.stream.read()
            worker.engine.tell(a=4)
            await worker.until(lambda state: state.predictions == 1)
            row = np.zeros((1, HIDDEN_SIZE), np.float32)
            row[0, 0] = 4
            expected = round(float(make_network().remaining_tokens(row)[0]))
            assert await worker.remaining() == {"a": min(expected, 99)}


async def test_a_predictor_of_another_model_is_not_believed(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    make_artefact(tmp_path / "artefact", fingerprint="f" * 16)
    async with local_mesh() as mesh:
        settings = PredictorSettings(artefact=(tmp_path / "artefact",), artefact_poll_s=0.01, learn=False)
        await mesh.start(PredictorRole(settings), "predictor-0")
        async with worker_in(mesh, tmp_path / "model") as worker:
            state = await worker.until(lambda state: state.source == "mean_residual")
            assert "has no artefact of the model 'm'" in state.reason
            await worker.stream.generate("a")
            await worker.until(lambda _: "a" in worker.engine.requests)
            worker.engine.step()
            worker.engine.tell(a=4)
            state = await worker.until(lambda state: state.failures == 1)
            assert "says nothing about 'm'" in state.reason
            # Nothing has ended here yet, so the fallback knows nothing either.
            assert await worker.remaining() == {"a": None}
            assert state.predictions == state.fallback_predictions == 0


async def test_a_mesh_without_a_predictor_says_so(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    async with local_mesh() as mesh, worker_in(mesh, tmp_path / "model") as worker:
        state = await worker.until(lambda state: state.source == "mean_residual")
        assert "no length predictor is in the mesh" in state.reason


async def test_a_model_that_nobody_trained_for_is_learnt_from_requests_that_end(tmp_path: Path) -> None:
    checkpoint(tmp_path / "model")
    async with local_mesh() as mesh:
        await mesh.start(PredictorRole(PredictorSettings()), "predictor-0")
        async with worker_in(mesh, tmp_path / "model") as worker:
            await worker.until(lambda state: state.source == "learnt")
            for name in ("a", "b"):
                await worker.stream.generate(name)
                await worker.until(lambda _, name=name: name in worker.engine.requests)
                worker.engine.step()
                await worker.stream.read()
                worker.engine.tell(**{name: 4})
                if name == "a":
                    # Nothing has ended yet, so nothing is known.
                    await worker.until(lambda state: state.latency_ms > 0)
                    assert await worker.remaining() == {"a": None}
                    worker.engine.step(finish=["a"])
                    await worker.until(lambda _: "a" not in worker.engine.requests)
            state = await worker.until(lambda state: state.predictions == 1)
            assert (state.source, state.artefact) == ("learnt", "m@learnt")
            assert (await worker.remaining())["b"] is not None
