"""A stock `vllm serve` that was started with our connector and worker extension, and an own engine: requests that move
between them in mid-decode, prefixes that are pulled, hidden states. Greedy output must not tell."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.attached.advice import kv_transfer_config
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import EngineFailed
from mesh.runtime import SystemClock
from penstock.testing.engine import GREEDY, EngineDriver
from services.cli.supervisor.local_mesh import DEMO_MODELS
from tests.kv.peer import TOKEN
from tests.mesh.running_mesh import free_port
from tests.vllm.moving import (
    BLOCK_TOKENS,
    DEADLINE_S,
    LONG,
    Side,
    all_free,
    begin,
    enough_of,
    expected,
    move_in_mid_decode,
    prompt,
)
from tests.vllm.test_attach import ALIKE, IN_ONE_PROCESS, MODEL, vllm_serve

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MODEL_PATH = str(DEMO_MODELS / MODEL)
V1_RUNNER = {"VLLM_USE_V2_MODEL_RUNNER": "0"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Side, Side]]:
    """The server, and an own engine."""
    folder = tmp_path_factory.mktemp("attached")
    port, events, replay = free_port(), free_port(), free_port()
    control = f"ipc://{folder}/control"
    ours = {"kv-transfer-config": kv_transfer_config(control), "worker-extension-cls": EXTENSION_CLASS}
    with vllm_serve(folder, port, events, replay, {**ALIKE, **ours}, IN_ONE_PROCESS):
        settings = AttachedSettings(
            f"http://127.0.0.1:{port}",
            model_path=MODEL_PATH,
            kv_events=f"tcp://127.0.0.1:{events}",
            kv_replay=f"tcp://127.0.0.1:{replay}",
            control=control,
            max_num_seqs=64,
            start_s=400.0,
            answer_s=10.0,
        )
        attached = AttachedEngine(settings, SystemClock())
        own = VllmEngine(
            VllmSettings(
                model_path=MODEL_PATH,
                dtype="float32",
                block_size=BLOCK_TOKENS,
                max_model_len=2048,
                kv_cache_memory_bytes=96 << 20,
            )
        )
        first, second = await asyncio.gather(attached.start(), own.start())
        made = Side(attached, EngineDriver(attached, first, 60.0)), Side(own, EngineDriver(own, second, 60.0))
        yield made
        for side in made:
            await side.driver.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Side]:
    """A server whose model is spread over two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    port, events, replay = free_port(), free_port(), free_port()
    control = f"ipc://{folder}/control"
    ours = {"kv-transfer-config": kv_transfer_config(control), "worker-extension-cls": EXTENSION_CLASS}
    with vllm_serve(folder, port, events, replay, {**ALIKE, **ours, "tensor-parallel-size": "2"}, V1_RUNNER):
        settings = AttachedSettings(
            f"http://127.0.0.1:{port}", model_path=MODEL_PATH, control=control, start_s=400.0, answer_s=30.0
        )
        attached = AttachedEngine(settings, SystemClock())
        side = Side(attached, EngineDriver(attached, await attached.start(), 200.0))
        yield side
        await side.driver.close()


@pytest.mark.parametrize("leaves", [True, False], ids=["out", "in"])
@pytest.mark.parametrize("tokens", [100, 700])
async def test_moved_in_mid_decode(sides: tuple[Side, Side], leaves: bool, tokens: int) -> None:
    source, target = sides if leaves else sides[::-1]
    await move_in_mid_decode(source, target, tokens, max_tokens=LONG, after=20)


async def test_a_pause_that_is_taken_back(sides: tuple[Side, Side]) -> None:
    server, own = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(server, own, 200, LONG, after=10)
    await migration.offer()
    await migration.pause()
    server.engine.resume(migration.request.request_id)
    own.engine.discard(migration.migration_id)
    await enough_of(server, migration.request, migration.answer)
    said = migration.answer.token_ids
    assert said == await expected(own, migration.request, len(said))
    await all_free(sides, free)


async def test_a_request_that_ends_while_it_is_paused_is_told_whole(sides: tuple[Side, Side]) -> None:
    """Its stream is closed for the pause, with tokens in it that nobody has read."""
    server, own = sides
    free = [await side.free_blocks() for side in sides]
    for max_tokens in range(2, 8):
        migration = await begin(server, own, 60, max_tokens, after=1)
        paused = await server.engine.pause(migration.request.request_id)
        if paused is not None:
            server.engine.resume(migration.request.request_id)
        await server.driver.end_of(migration.answer)
        assert migration.answer.token_ids == await expected(own, migration.request)
    await all_free(sides, free)


@pytest.mark.parametrize("leaves", [True, False], ids=["out", "in"])
async def test_a_cached_prefix_is_pulled(sides: tuple[Side, Side], leaves: bool) -> None:
    source, target = sides if leaves else sides[::-1]
    free = [await side.free_blocks() for side in sides]
    shared = prompt(600)
    short = replace(GREEDY, max_tokens=24)
    computed = await source.driver.answer(shared, short)
    blocks, name = 599 // BLOCK_TOKENS, EngineRequest(f"pull-{leaves}", shared, SamplingParams(max_tokens=1))
    try:
        held = await source.engine.prefixes.hold(name.request_id, name, blocks, 0.0, TOKEN)
        assert len(held) == blocks
        fetched = await target.engine.prefixes.fetch(
            name.request_id, name, f"{TOKEN}@{source.engine.kv_address}", held, DEADLINE_S
        )
    finally:
        source.engine.prefixes.let_go(name.request_id)
    assert fetched == blocks
    if not leaves:  # of whose cache an event tells a little later
        await target.driver.until(lambda: set(block_hashes(shared, BLOCK_TOKENS)) <= target.driver.cached_hashes)
    pulled = await target.driver.answer(shared, short)
    assert pulled.cached_tokens == blocks * BLOCK_TOKENS
    assert pulled.token_ids == computed.token_ids
    await all_free(sides, free)


async def test_hidden_states_come_under_the_meshs_names(sides: tuple[Side, Side]) -> None:
    seen: dict[str, dict[int, bytes]] = {}
    for side in sides:
        assert isinstance(side.engine, AttachedEngine | VllmEngine)
        assert await side.engine.capture_hidden_states(2) == ""
        states = seen[type(side.engine).__name__] = {}
        reading = asyncio.create_task(read_states(side, states))
        request = EngineRequest("told", tuple(random.Random(7).choices(range(10, 600), k=90)), GREEDY)
        await side.driver.end_of(side.driver.submit_request(request))
        async with asyncio.timeout(20):
            while len(states) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        reading.cancel()
        await side.engine.capture_hidden_states(0)
    first, second = seen.values()
    assert first.keys() & second.keys()
    for context in first.keys() & second.keys():
        assert first[context] == second[context]


async def read_states(side: Side, into: dict[int, bytes]) -> None:
    async for batch in side.engine.hidden_states():
        for row, request_id in enumerate(batch.request_ids):
            assert request_id == "told"
            width = batch.hidden_size * 4
            into[batch.context_tokens[row]] = batch.states[row * width : (row + 1) * width]


async def test_one_worker_at_a_time(sides: tuple[Side, Side], monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = sides
    assert isinstance(server.engine, AttachedEngine)
    monkeypatch.setattr("engine_worker.engines.attached.moves._ATTACH_S", 0.0)
    second = AttachedEngine(server.engine._settings, SystemClock())
    with pytest.raises(EngineFailed, match="the server has a worker, which was last heard"):
        await second.start()
    await second.stop()


@pytest.mark.ranks
@pytest.mark.parametrize("leaves", [True, False], ids=["out", "in"])
async def test_a_server_of_two_ranks_moves_too(sides: tuple[Side, Side], two_ranks: Side, leaves: bool) -> None:
    _, own = sides
    source, target = (two_ranks, own) if leaves else (own, two_ranks)
    await move_in_mid_decode(source, target, 400, max_tokens=600, after=10)


@pytest.mark.ranks
async def test_the_rank_that_has_hidden_states_tells_them(two_ranks: Side) -> None:
    assert isinstance(two_ranks.engine, AttachedEngine)
    states: dict[int, bytes] = {}
    assert await two_ranks.engine.capture_hidden_states(2) == ""
    reading = asyncio.create_task(read_states(two_ranks, states))
    request = EngineRequest("told", tuple(random.Random(7).choices(range(10, 600), k=90)), GREEDY)
    await two_ranks.driver.end_of(two_ranks.driver.submit_request(request))
    await two_ranks.driver.until(lambda: len(states) >= 4)
    reading.cancel()
    assert await two_ranks.engine.capture_hidden_states(0) == ""
    assert {len(each) for each in states.values()} == {len(next(iter(states.values())))}
    assert all(any(each) for each in states.values()), "a state is not zero"
