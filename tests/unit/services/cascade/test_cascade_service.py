"""Cascades over gRPC: set up, judged by, changed, removed."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import pytest

from controlplane.model.cascade_record import CASCADES_PREFIX
from controlplane.protocols.cascade.no_score import NO_SCORE
from mesh.rpc.client import open_channel
from mesh.runtime import GrpcTransport
from penstock.v1 import cascade_pb2, cascade_pb2_grpc
from services.cascade.judges.chain import JudgeChain
from services.cascade.role import CascadeRole
from services.cascade.sampling.samplers import Samplers
from services.cascade.settings import CascadeSettings
from tests.unit.controlplane.local_mesh import LocalMesh, local_mesh

pytestmark = pytest.mark.live

TWO = cascade_pb2.CascadeDescription(
    name="both", tiers=["small", "large"], thresholds=[70.0], judges=["exact", "confidence"]
)


@pytest.fixture
async def mesh() -> AsyncIterator[LocalMesh]:
    async with local_mesh() as mesh:
        yield mesh


@pytest.fixture
async def cascade(mesh: LocalMesh) -> AsyncIterator[cascade_pb2_grpc.CascadeStub]:
    started = await mesh.start(CascadeRole(CascadeSettings()), "cascade-0")
    async with open_channel(GrpcTransport(), started.address) as channel:
        yield cascade_pb2_grpc.CascadeStub(channel)


async def until(stub: cascade_pb2_grpc.CascadeStub, holds: Callable[[list[str]], bool]) -> list[str]:
    for _ in range(500):
        names = [c.name for c in (await stub.ListCascades(cascade_pb2.ListCascadesRequest())).cascades]
        if holds(names):
            return names
    raise AssertionError(f"the cascades stay {names}")


async def set_up(stub: cascade_pb2_grpc.CascadeStub, cascade: cascade_pb2.CascadeDescription) -> None:
    await stub.SetCascade(cascade_pb2.SetCascadeRequest(cascade=cascade))
    await until(stub, lambda names: cascade.name in names)


async def test_without_a_cascade_nothing_is_judged(cascade: cascade_pb2_grpc.CascadeStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="penstock cascade set") as refused:
        await cascade.Judge(cascade_pb2.JudgeRequest(request_id="r", answer="4"))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    answer = await cascade.GetThresholds(cascade_pb2.GetThresholdsRequest())
    assert (list(answer.tiers), list(answer.thresholds)) == ([], [])


async def test_a_cascade_judges_by_the_first_judge_that_can(cascade: cascade_pb2_grpc.CascadeStub) -> None:
    await set_up(cascade, TWO)
    request = cascade_pb2.JudgeRequest(
        cascade="both", prompt="Count from 7 up to 9.", answer="7 8 9", tier="small", token_logprobs=[-1.0, -1.0]
    )
    judged = await cascade.Judge(request)
    assert (judged.score, judged.judge, list(judged.passed_over)) == (100.0, "exact", [])
    request.prompt = "Something else"
    judged = await cascade.Judge(request)
    assert judged.judge == "confidence"
    assert judged.score == pytest.approx(36.8, abs=0.1)
    assert "exact: not a demo task" in judged.passed_over[0]
    del request.token_logprobs[:]
    with pytest.raises(grpc.aio.AioRpcError, match=r"exact: .*confidence: ") as unjudged:
        await cascade.Judge(request)
    assert unjudged.value.code() is grpc.StatusCode.UNAVAILABLE
    assert NO_SCORE in tuple(map(tuple, unjudged.value.trailing_metadata())), "the router is well"


async def test_a_first_judge_without_a_score_counts_whether_another_stood_in_or_none(mesh: LocalMesh) -> None:
    started = await mesh.start(CascadeRole(CascadeSettings()), "cascade-0")
    async with open_channel(GrpcTransport(), started.address) as channel:
        stub = cascade_pb2_grpc.CascadeStub(channel)  # type: ignore[no-untyped-call]
        await set_up(stub, TWO)

        def counted() -> tuple[float | None, float | None]:
            passed_over = started.metric("penstock_cascade_judge_passed_over_total", cascade="both")
            return passed_over, started.metric("penstock_cascade_unjudged_total", cascade="both")

        request = cascade_pb2.JudgeRequest(cascade="both", prompt="Count from 7 up to 9.", answer="7 8 9", tier="small")
        await stub.Judge(request)
        assert counted() == (None, None)
        request.prompt = "Something else"
        request.token_logprobs.extend([-1.0, -1.0])
        await stub.Judge(request)
        assert counted() == (1, None)
        del request.token_logprobs[:]
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Judge(request)
        assert counted() == (2, 1)


async def test_what_is_only_a_sample_is_not_judged(mesh: LocalMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    started = await mesh.start(CascadeRole(CascadeSettings(max_judging=0)), "cascade-0")
    async with open_channel(GrpcTransport(), started.address) as channel:
        stub = cascade_pb2_grpc.CascadeStub(channel)  # type: ignore[no-untyped-call]
        await set_up(stub, TWO)
        request = cascade_pb2.JudgeRequest(cascade="both", tier="small", sample_only=True, first_answer=True)
        assert (await stub.Judge(request)).judge == "", "although no more may be judged"
        assert started.metric("penstock_cascade_judge_seconds_count", cascade="both") is None
        request.sample_only = False
        counted: list[object] = []
        monkeypatch.setattr(Samplers, "offer", lambda _, record, request, judgement: counted.append(judgement))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Judge(request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert counted == [None], "it came, although nobody judges it"


async def test_a_request_whose_deadline_cuts_its_judgement_counts(
    cascade: cascade_pb2_grpc.CascadeStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    await set_up(cascade, TWO)
    counted: asyncio.Queue[object] = asyncio.Queue()
    monkeypatch.setattr(Samplers, "offer", lambda _, record, request, judgement: counted.put_nowait(judgement))
    monkeypatch.setattr(JudgeChain, "judge", lambda *_: asyncio.Event().wait())
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await cascade.Judge(cascade_pb2.JudgeRequest(cascade="both", tier="small", first_answer=True), timeout=0.1)
    assert cut.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await asyncio.wait_for(counted.get(), 5.0) is None


async def test_thresholds_are_those_of_the_only_cascade_or_of_the_one_named(
    cascade: cascade_pb2_grpc.CascadeStub,
) -> None:
    await set_up(cascade, TWO)
    assert list((await cascade.GetThresholds(cascade_pb2.GetThresholdsRequest())).thresholds) == [70.0]
    other = cascade_pb2.CascadeDescription(name="other", tiers=["small", "large"], thresholds=[20.0])
    await set_up(cascade, other)
    named = await cascade.GetThresholds(cascade_pb2.GetThresholdsRequest(cascade="other"))
    assert list(named.thresholds) == [20.0]
    with pytest.raises(grpc.aio.AioRpcError, match="both, other") as unnamed:
        await cascade.GetThresholds(cascade_pb2.GetThresholdsRequest())
    assert unnamed.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_removed_cascade_is_gone(cascade: cascade_pb2_grpc.CascadeStub) -> None:
    await set_up(cascade, TWO)
    assert (await cascade.RemoveCascade(cascade_pb2.RemoveCascadeRequest(name="both"))).removed
    await until(cascade, lambda names: not names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "a/b"}, "slash"),
        ({"tiers": ["small"]}, "thresholds"),
        ({"tiers": ["small", "small"]}, "different models"),
        ({"tiers": ["both", "large"]}, "tier of its own"),
        ({"thresholds": [-1.0]}, "scores"),
        ({"judges": ["nobody"]}, "no judge 'nobody'"),
        ({"judges": ["model:both"]}, "judge its own"),
        ({"without_judge": "guess"}, "escalate or accept"),
        ({"expected_s": [1.0]}, "each tier"),
    ],
)
async def test_cascades_that_cannot_be_served_are_refused(
    cascade: cascade_pb2_grpc.CascadeStub, change: dict[str, object], words: str
) -> None:
    wrong = cascade_pb2.CascadeDescription(
        **{"name": "both", "tiers": ["small", "large"], "thresholds": [70.0], **change}  # type: ignore[arg-type]
    )
    with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
        await cascade.SetCascade(cascade_pb2.SetCascadeRequest(cascade=wrong))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_broken_record_in_the_store_leaves_the_good_one_in_force(
    mesh: LocalMesh, cascade: cascade_pb2_grpc.CascadeStub
) -> None:
    await set_up(cascade, TWO)
    await mesh.store.put(CASCADES_PREFIX + "both", b'{"name": "both"}')
    await set_up(cascade, cascade_pb2.CascadeDescription(name="later", tiers=["x"]))
    thresholds = await cascade.GetThresholds(cascade_pb2.GetThresholdsRequest(cascade="both"))
    assert list(thresholds.thresholds) == [70.0]


async def test_the_thresholds_in_force_are_shown_and_those_of_a_cascade_that_is_gone_are_not(mesh: LocalMesh) -> None:
    started = await mesh.start(CascadeRole(CascadeSettings()), "cascade-0")
    async with open_channel(GrpcTransport(), started.address) as channel:
        stub = cascade_pb2_grpc.CascadeStub(channel)  # type: ignore[no-untyped-call]
        await set_up(stub, TWO)
        assert started.metric("penstock_cascade_threshold", cascade="both", tier="small") == 70.0
        assert started.metric("penstock_cascade_threshold", cascade="both", tier="large") is None, "the last has none"
        await stub.RemoveCascade(cascade_pb2.RemoveCascadeRequest(name="both"))
        await until(stub, lambda names: not names)
        assert started.metric("penstock_cascade_threshold", cascade="both", tier="small") is None
