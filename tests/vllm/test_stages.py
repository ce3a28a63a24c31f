"""Requests change stages between three vLLM engines in mid-stream; their greedy output must not tell."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.planning.qoe import QoeModel
from controlplane.policies.stages.agent import StageParameters
from controlplane.policies.stages.layout import StageLayout
from controlplane.policies.stages.record import StageRecord, layout_key
from controlplane.policies.stages.refinement import Refinement, RefinementParameters
from engine_worker.settings import WorkerSettings
from tests.in_time import still
from tests.unit.engine_worker.coordinator.running_workers import MODEL, Workers, running_workers

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("ucxx", reason="KV transfers need UCX")

CHECKPOINT = Path(__file__).parents[2] / "demo" / "models" / "demo-large"
OPTIONS = ("dtype=float32", "block_size=32", "kv_cache_memory_bytes=100663296", "max_num_batched_tokens=256")
SETTINGS = WorkerSettings(model=MODEL, model_path=str(CHECKPOINT), engine="vllm", engine_arg=OPTIONS)
NAMES = ("a", "b", "c")
PLAN_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Workers]:
    async with running_workers(*NAMES, settings=SETTINGS) as workers:
        yield workers


async def use(mesh: Workers, layout: StageLayout | None) -> None:
    """Put the plan into the store, or take it away, and wait until every worker has heard of it."""
    store = mesh.workers["a"].context.store
    if layout is None:
        await store.delete(layout_key(MODEL))
    else:
        frozen = StageParameters(RefinementParameters(policy=Refinement.FROZEN), report_interval_s=0.2)
        record = StageRecord(layout, QoeModel(8.0, 0.05, 1e-4, 1e-8, 2e-4), "a test", 0.0, 0, 0.0, 0, parameters=frozen)
        await store.put(layout_key(MODEL), msgspec.json.encode(record))
    async with asyncio.timeout(PLAN_S):
        while any(  # noqa: ASYNC110  what a worker has heard of sets no event here
            (None if layout is None else layout.stage_with(name)) != stage(mesh, name) for name in NAMES
        ):
            await asyncio.sleep(0.05)


def stage(mesh: Workers, name: str) -> int | None:
    agent = mesh.workers[name].role.stages.manager.agent  # type: ignore[union-attr]
    return None if agent is None else agent.stage


def request_of(name: str, tokens: int, max_tokens: int) -> EngineRequest:
    prompt = tuple(random.Random(name.partition("/")[0]).choices(range(10, 600), k=tokens))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


async def test_requests_flow_through_the_stages_with_exact_output(mesh: Workers) -> None:
    sizes = ((60, 400), (90, 380), (40, 420))
    requests = [request_of(f"r{number}", *size) for number, size in enumerate(sizes)]
    await use(mesh, StageLayout(MODEL, 1, (("a",), ("b",), ("c",)), (160, 300)))
    heard = [await mesh.generate("a", request) for request in requests]
    await mesh.until_ended(*(request.request_id for request in requests))
    still(
        all(sorted(each.moved_to) == ["b", "c"] for each in heard),
        f"each moves in time: {[each.moved_to for each in heard]}",
    )
    await use(mesh, None)
    again = [
        request_of(f"{request.request_id}/undisturbed", *size) for request, size in zip(requests, sizes, strict=True)
    ]
    undisturbed = [await mesh.generate("c", request) for request in again]
    await mesh.until_ended(*(request.request_id for request in again))
    assert all(each.moved_to == [] for each in undisturbed)
    assert [each.token_ids for each in heard] == [each.token_ids for each in undisturbed]
