"""The predictor over gRPC: batches, refusals, and an artefact that changes under it."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import predictor_pb2, predictor_pb2_grpc
from services.predictor.artefact_registry import ArtefactRegistry
from services.predictor.role import PredictorRole
from services.predictor.settings import PredictorSettings
from tests.unit.controlplane.local_mesh import local_mesh
from tests.unit.services.predictor.artefacts import FINGERPRINT, HIDDEN_SIZE, make_artefact, make_network

pytestmark = pytest.mark.live


@asynccontextmanager
async def predictor(*folders: Path, learn: bool = False, learnt_dir: Path | None = None) -> AsyncIterator[Any]:
    async with local_mesh() as mesh:
        settings = PredictorSettings(
            artefact=folders, artefact_poll_s=0.01, learn=learn, learnt_dir=learnt_dir, learn_share=1.0
        )
        member = await mesh.start(PredictorRole(settings), "predictor-0")
        async with open_channel(GrpcTransport(), member.address) as channel:
            yield predictor_pb2_grpc.LengthPredictorStub(channel)


def batch(rows: int = 3, **fields: Any) -> predictor_pb2.PredictRequest:
    states = np.random.default_rng(1).normal(size=(rows, HIDDEN_SIZE)).astype("<f4")
    complete = {
        "model": "m",
        "model_fingerprint": FINGERPRINT,
        "hidden_size": HIDDEN_SIZE,
        "hidden_states": states.tobytes(),
        "request_ids": [f"r{row}" for row in range(rows)],
        "generated_tokens": range(rows),
        "prompt_tokens": range(10, 10 + rows),
    }
    return predictor_pb2.PredictRequest(**(complete | fields))


async def test_without_an_artefact_nothing_is_predicted() -> None:
    async with predictor() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match="no length predictor is loaded for the model 'm'") as refused:
            await stub.Predict(batch())
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        answer = await stub.GetArtefact(predictor_pb2.GetArtefactRequest())
        assert answer.artefact == ""
        assert answer.fallback == "mean_residual"


async def test_a_batch_is_predicted_in_its_order(tmp_path: Path) -> None:
    metadata = make_artefact(tmp_path)
    async with predictor(tmp_path) as stub:
        request = batch(rows=40)
        answer = await stub.Predict(request)
        assert answer.artefact == f"m@{metadata.version}"
        states = np.frombuffer(request.hidden_states, "<f4").reshape(40, HIDDEN_SIZE)
        np.testing.assert_allclose(answer.remaining_tokens, make_network().remaining_tokens(states), rtol=1e-6)
        one_by_one = [
            (
                await stub.Predict(
                    batch(1, hidden_states=states[row].tobytes(), generated_tokens=[row], prompt_tokens=[10 + row])
                )
            ).remaining_tokens[0]
            for row in (0, 17, 39)
        ]
        np.testing.assert_allclose(one_by_one, [answer.remaining_tokens[row] for row in (0, 17, 39)], rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "code", "reason"),
    [
        ({"hidden_states": b"1234"}, "INVALID_ARGUMENT", "3 states of width 8 take 96 bytes, got 4"),
        ({"generated_tokens": [1]}, "INVALID_ARGUMENT", "3 requests need as many generated_tokens"),
        ({"request_ids": []}, "INVALID_ARGUMENT", "a batch has 1 to 4096 requests, not 0"),
        ({"model_fingerprint": "f" * 16}, "FAILED_PRECONDITION", "was trained on 'm'"),
        ({"hidden_size": 4, "hidden_states": bytes(48)}, "FAILED_PRECONDITION", "takes hidden states of width 8"),
    ],
)
async def test_what_cannot_be_predicted_is_refused(
    tmp_path: Path, fields: dict[str, Any], code: str, reason: str
) -> None:
    make_artefact(tmp_path)
    async with predictor(tmp_path) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
            await stub.Predict(batch(**fields))
        assert refused.value.code() is grpc.StatusCode[code]


async def test_an_artefact_is_swapped_while_it_is_served(tmp_path: Path) -> None:
    first = make_artefact(tmp_path, seed=0)
    async with predictor(tmp_path) as stub:
        assert (await stub.Predict(batch())).artefact == f"m@{first.version}"
        second = make_artefact(tmp_path, seed=1)
        while (await stub.Predict(batch())).artefact != f"m@{second.version}":
            pass
        (tmp_path / "predictor.json").write_text("{}")
        while not (status := await stub.GetArtefact(predictor_pb2.GetArtefactRequest())).folders[0].refused:
            pass
        assert "is no artefact" in status.folders[0].refused
        assert status.artefact == f"m@{second.version}"
        assert (await stub.Predict(batch())).artefact == f"m@{second.version}"


async def test_a_watch_that_dies_ends_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_artefact(tmp_path)
    async with local_mesh() as mesh:
        role = PredictorRole(PredictorSettings(artefact=(tmp_path,), artefact_poll_s=0.01))
        await mesh.start(role, "predictor-0")

        def broken(_: ArtefactRegistry) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(ArtefactRegistry, "reload", broken)
        with pytest.raises(ZeroDivisionError):
            await role.failed()


async def serve_and_end(stub: Any, requests: int, first: int = 0) -> predictor_pb2.PredictResponse:
    """Requests of 40 tokens, of which a call sees one and hears of the end of the one before."""
    for number in range(first, first + requests):
        ended = {"ended_request_ids": [f"r{number - 1}"], "ended_output_tokens": [40]} if number else {}
        answer = await stub.Predict(
            batch(rows=1, request_ids=[f"r{number}"], generated_tokens=[10], **ended)  # type: ignore[arg-type]
        )
    return answer


async def test_a_model_without_an_artefact_is_learnt_while_it_is_served() -> None:
    async with predictor(learn=True) as stub:
        answer = await serve_and_end(stub, 1)
        assert answer.is_learnt
        assert math.isnan(answer.remaining_tokens[0])
        answer = await serve_and_end(stub, 70, first=1)
        assert answer.artefact == "m@learnt"
        assert answer.low_tokens[0] <= answer.remaining_tokens[0] <= answer.high_tokens[0]
        assert 25 <= answer.remaining_tokens[0] <= 35
        state = await stub.GetArtefact(predictor_pb2.GetArtefactRequest())
        (learnt,) = state.learnt
        assert state.learns
        assert (learnt.model, learnt.ended_requests, learnt.hidden_size) == ("m", 70, HIDDEN_SIZE)
        assert learnt.coverage > 0.9


async def test_an_artefact_comes_before_what_is_learnt(tmp_path: Path) -> None:
    metadata = make_artefact(tmp_path)
    async with predictor(tmp_path, learn=True) as stub:
        answer = await stub.Predict(batch())
        assert answer.artefact == f"m@{metadata.version}"
        assert not answer.is_learnt


async def test_what_was_learnt_outlives_the_predictor(tmp_path: Path) -> None:
    async with predictor(learn=True, learnt_dir=tmp_path) as stub:
        await serve_and_end(stub, 30)
    async with predictor(learn=True, learnt_dir=tmp_path) as stub:
        answer = await stub.Predict(batch(rows=1, generated_tokens=[10]))
        assert answer.remaining_tokens[0] == 30
        state = await stub.GetArtefact(predictor_pb2.GetArtefactRequest())
        assert state.learnt[0].ended_requests == 29


async def test_a_damaged_file_is_named_and_learning_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with predictor(learn=True, learnt_dir=tmp_path) as stub:
        await serve_and_end(stub, 10)
    (file,) = tmp_path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    async with predictor(learn=True, learnt_dir=tmp_path) as stub:
        answer = await stub.Predict(batch(rows=1))
        assert math.isnan(answer.remaining_tokens[0])
    assert any("cannot be used" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    "fields",
    [
        {"period_tokens": [1]},
        {"ended_request_ids": ["a"]},
        {"hidden_size": 1 << 20, "hidden_states": b""},
    ],
)
async def test_what_a_learner_is_told_is_checked(fields: dict[str, Any]) -> None:
    async with predictor(learn=True) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Predict(batch(**fields))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
