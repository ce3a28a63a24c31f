"""Workers with simulated engines pull each other's cached prefixes, over gRPC and UCX."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.model.request import EngineRequest
from engine_worker.prefix_pull.speed import LEAST_STEP_TOKENS
from tests.in_time import still
from tests.unit.engine_worker.coordinator.running_workers import (
    Heard,
    Workers,
    make_request,
    running_workers,
    undisturbed,
)

pytestmark = pytest.mark.live

pytest.importorskip("ucxx", reason="KV transfers need UCX")

SHARED = make_request("warm", prompt=600, max_tokens=4)
BLOCKS = 37
"""Full blocks of the shared prompt, of 16 tokens."""


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    async with running_workers("a", "b", options=("cost.prefill_token_ms=0.5",)) as running:
        yield running


async def warm(workers: Workers, name: str = "a", request: EngineRequest = SHARED) -> None:
    """Have a worker compute a prompt."""
    await workers.generate(name, request)
    await workers.until_ended(request.request_id)


async def pull(workers: Workers, request: EngineRequest, tokens: int = 600, source: str = "a") -> Heard:
    return await workers.generate("b", request, prefix=(source, tokens))


def outcomes(workers: Workers, name: str = "b") -> dict[str, float]:
    worker = workers.workers[name]
    kinds = ("pulled", "refused", "late", "failed", "cancelled")
    found = {kind: worker.metric("penstock_prefix_pulls_total", outcome=kind) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


async def ended(workers: Workers, *request_ids: str) -> None:
    """They are over, and a pull was quicker than to compute the prefix, as on a machine that is not busy."""
    await workers.until_ended(*request_ids)
    still("late" not in outcomes(workers), "the prefix is pulled")


async def all_free(workers: Workers) -> None:
    """Every block is free again, nothing is held and nobody waits."""
    async with asyncio.timeout(10.0):
        while any(each.engine.transfers for each in workers.workers.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    for worker in workers.workers.values():
        worker.role.validate()
        worker.engine.instance.validate()
        assert worker.engine.load().kv_blocks_used == 0
        assert not len(worker.role.puller.target)
        assert not worker.role.puller.source.manager.hold_ids


def like(request_id: str, **fields: Any) -> EngineRequest:
    return replace(SHARED, request_id=request_id, **fields)


async def test_a_request_begins_with_the_prefix_that_another_instance_has(workers: Workers) -> None:
    await warm(workers)
    request = like("r")
    heard = await pull(workers, request)
    await ended(workers, "r")
    assert heard.token_ids == undisturbed(request)
    assert heard.cached_tokens == 16 * BLOCKS
    assert outcomes(workers) == {"pulled": 1}
    b = workers.workers["b"]
    assert b.metric("penstock_prefix_pulled_tokens_total") == 16 * BLOCKS
    assert b.metric("penstock_prefix_pulled_bytes_total") == BLOCKS * b.engine.kv_block_bytes
    assert workers.workers["a"].metric("penstock_prefix_holds_total") == 1
    await all_free(workers)


async def test_only_what_lacks_is_pulled_and_the_rest_is_computed(workers: Workers) -> None:
    await warm(workers)
    # So short that `b` does not know yet how fast it computes, and gives the pull seconds.
    short = like("short", prompt_token_ids=SHARED.prompt_token_ids[: LEAST_STEP_TOKENS - 4])
    await warm(workers, "b", short)
    longer = like("longer", prompt_token_ids=SHARED.prompt_token_ids + tuple(range(5, 100)))
    heard = await pull(workers, longer, tokens=592)
    await ended(workers, "longer")
    assert heard.token_ids == undisturbed(longer)
    assert heard.cached_tokens == 592
    assert workers.workers["b"].metric("penstock_prefix_pulled_tokens_total") == 592 - 48
    await all_free(workers)


async def test_what_the_source_does_not_have_is_computed(workers: Workers) -> None:
    request = like("r")
    heard = await pull(workers, request)
    await ended(workers, "r")
    assert heard.token_ids == undisturbed(request)
    assert heard.cached_tokens == 0
    assert outcomes(workers) == {"refused": 1}
    await all_free(workers)


@pytest.mark.parametrize("source", ["nobody", "b"])
async def test_a_source_that_is_not_there_costs_nothing(workers: Workers, source: str) -> None:
    heard = await pull(workers, like("r"), source=source)
    await ended(workers, "r")
    assert heard.token_ids == undisturbed(like("r"))
    assert outcomes(workers) == ({"refused": 1} if source == "nobody" else {})


async def test_choices_of_one_prompt_share_a_pull(workers: Workers) -> None:
    await warm(workers)
    for name in ("r/0", "r/1", "r/2"):
        await pull(workers, like(name))
    await ended(workers, "r/0", "r/1", "r/2")
    assert outcomes(workers) == {"pulled": 1}
    assert {workers.heard[name].cached_tokens for name in ("r/0", "r/1", "r/2")} == {16 * BLOCKS}
    await all_free(workers)


async def test_who_comes_without_an_order_waits_for_what_is_pulled_already(workers: Workers) -> None:
    """As the next turn of a conversation, or a sibling, that is placed where the first one waits for its prefix."""
    await warm(workers)
    await pull(workers, like("first"))
    next_turn = like("next", prompt_token_ids=SHARED.prompt_token_ids + tuple(range(5, 100)))
    heard = await workers.generate("b", next_turn)
    other = await workers.generate("b", like("salted", cache_salt="another"))
    await ended(workers, "first", "next", "salted")
    assert outcomes(workers) == {"pulled": 1}
    assert heard.token_ids == undisturbed(next_turn)
    assert (heard.cached_tokens, other.cached_tokens) == (16 * BLOCKS, 0)
    await all_free(workers)


async def test_a_request_that_is_taken_back_while_it_waits_frees_everything(workers: Workers) -> None:
    await warm(workers)
    heard = await pull(workers, like("r"))
    await workers.abort("b", "r")
    await ended(workers, "r")
    assert heard.token_ids in ([], undisturbed(like("r"))[: len(heard.token_ids)])
    await all_free(workers)
    assert not workers.workers["b"].instance.table.find("r")


async def test_blocks_to_come_are_waited_for(workers: Workers) -> None:
    first = await workers.generate("a", like("first"))
    heard = await pull(workers, like("second"))
    await ended(workers, "first", "second")
    assert first.token_ids == heard.token_ids == undisturbed(SHARED)
    assert heard.cached_tokens == 16 * BLOCKS
    assert outcomes(workers) == {"pulled": 1}
    await all_free(workers)


async def test_a_source_of_other_weights_or_of_another_life_refuses(workers: Workers) -> None:
    await warm(workers)
    workers.workers["a"].role.puller._known_fingerprint = "0badcafe"
    heard = await pull(workers, like("r"))
    await ended(workers, "r")
    assert heard.token_ids == undisturbed(like("r"))
    assert outcomes(workers) == {"refused": 1}
    assert workers.workers["a"].metric("penstock_prefix_refused_holds_total") == 1
    await all_free(workers)


async def test_another_cache_salt_is_another_prefix(workers: Workers) -> None:
    await warm(workers)
    heard = await pull(workers, like("r", cache_salt="tenant"))
    await ended(workers, "r")
    assert heard.cached_tokens == 0
    assert outcomes(workers) == {"refused": 1}


async def test_what_only_the_host_of_the_source_has_is_loaded_there_and_pulled(tmp_path: Path) -> None:
    options = ("cost.prefill_token_ms=0.5", "host_kv_bytes=1000000", f"host_kv_dir={tmp_path}")
    async with running_workers("a", "b", "source", options=options) as workers:
        await warm(workers)
        source = workers.workers["source"]
        async with asyncio.timeout(10.0):
            while True:
                source.engine.host_store.changes()
                if len(source.engine.host_store) >= BLOCKS:
                    break
                await asyncio.sleep(0.005)
        heard = await pull(workers, like("r"), source="source")
        await ended(workers, "r")
        assert heard.token_ids == undisturbed(like("r"))
        assert heard.cached_tokens == 16 * BLOCKS
        assert outcomes(workers) == {"pulled": 1}
        assert workers.workers["b"].metric("penstock_prefix_pulled_tokens_total") == 16 * BLOCKS
        assert source.engine.load().prefilled_tokens_total == 0
        assert source.engine.load().host_hit_tokens_total == 0, "of no request there"
        await all_free(workers)
