"""Prefill on one vLLM engine, decode on another: whole workers, whose greedy output must not tell."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.settings import WorkerSettings
from tests.in_time import still
from tests.unit.engine_worker.coordinator.running_workers import MODEL, Heard, Workers, running_workers

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
pytest.importorskip("ucxx", reason="KV transfers need UCX")

CHECKPOINT = Path(__file__).parents[2] / "demo" / "models" / "demo-large"
OPTIONS = ("dtype=float32", "block_size=32", "kv_cache_memory_bytes=100663296", "max_num_batched_tokens=256")
SETTINGS = WorkerSettings(model=MODEL, model_path=str(CHECKPOINT), engine="vllm", engine_arg=OPTIONS)
TWO_RANKS = {"two": ("tensor_parallel_size=2", "cpu_niceness=0")}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh() -> AsyncIterator[Workers]:
    # The one of several processes first: what the others set in the environment is not for it.
    async with running_workers("two", "p", "d", settings=SETTINGS, more_options=TWO_RANKS) as workers:
        workers.wait_s = 120.0  # its ranks spin, and each wants a core
        yield workers


def request_of(name: str, tokens: int, max_tokens: int = 80) -> EngineRequest:
    prompt = tuple(random.Random(name).choices(range(10, 600), k=tokens))
    return EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


async def truth(mesh: Workers, *requests: EngineRequest) -> list[list[int]]:
    """What one engine says that does both; it has seen nothing of the prompts."""
    again = [EngineRequest(f"{each.request_id}-undisturbed", each.prompt_token_ids, each.sampling) for each in requests]
    heard = [await mesh.generate("d", each) for each in again]
    await mesh.until_ended(*(each.request_id for each in again))
    return [each.token_ids for each in heard]


def transfers(mesh: Workers, outcome: str, source: str = "p") -> float:
    return mesh.workers[source].metric("penstock_worker_transfers_total", outcome=outcome)


@pytest.mark.parametrize("tokens", [10, 200, 1000, 3000])
async def test_the_output_is_that_of_one_engine(mesh: Workers, tokens: int) -> None:
    moved_before = transfers(mesh, "moved")
    prefilled_before = mesh.workers["d"].engine.load().prefilled_tokens_total
    request = request_of(f"r{tokens}", tokens)
    heard: Heard = await mesh.generate("p", request, decode="d")
    await mesh.until_tokens(request.request_id, 1)
    still(heard.owner == "p", "its first token is heard before it moves")
    await mesh.until_ended(request.request_id)
    still(bool(heard.moved_to), "it is moved before it ends")
    assert (heard.owner, heard.moved_to, heard.epoch) == ("d", ["d"], 1)
    assert transfers(mesh, "moved") == moved_before + 1
    computed_again = mesh.workers["d"].engine.load().prefilled_tokens_total - prefilled_before
    assert computed_again <= 2 * 32, "at most a few tokens behind the last block that was carried"
    assert [heard.token_ids] == await truth(mesh, request)


@pytest.mark.parametrize(("source", "target"), [("two", "d"), ("p", "two")])
async def test_prefill_and_decode_may_have_different_numbers_of_ranks(mesh: Workers, source: str, target: str) -> None:
    moved_before = transfers(mesh, "moved", source)
    request = request_of(f"from-{source}", 400, max_tokens=160)
    heard = await mesh.generate(source, request, decode=target)
    await mesh.until_ended(request.request_id)
    still(bool(heard.moved_to), "it is moved before it ends")
    assert (heard.owner, heard.moved_to, heard.epoch) == (target, [target], 1)
    assert transfers(mesh, "moved", source) == moved_before + 1
    assert [heard.token_ids] == await truth(mesh, request)


async def test_many_at_once(mesh: Workers) -> None:
    moved_before = transfers(mesh, "moved")
    requests = [request_of(f"many-{number}", 150 + 97 * number, max_tokens=120) for number in range(8)]
    heard = [await mesh.generate("p", request, decode="d") for request in requests]
    await mesh.until_ended(*(request.request_id for request in requests))
    still(transfers(mesh, "moved") - moved_before >= 6, "most of them move before they end")
    assert [each.token_ids for each in heard] == await truth(mesh, *requests)


async def test_a_request_that_stays_is_not_transferred(mesh: Workers) -> None:
    request = request_of("stays", 500)
    heard = await mesh.generate("p", request, decode="p")
    await mesh.until_ended("stays")
    assert (heard.owner, heard.epoch, heard.moved_to) == ("p", 0, [])
    assert [heard.token_ids] == await truth(mesh, request)
