"""A stock `vllm serve` of two engine cores that was started with our connector: each core has the requests that are
sent to it, and they and their prefixes move between the cores as between any two engines. Greedy output must not tell.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest
from engine_worker.engines.attached.advice import kv_transfer_config
from engine_worker.engines.attached.data_parallel import DataParallelAttached
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.settings import AttachedSettings
from engine_worker.engines.data_parallel import merged
from engine_worker.engines.vllm.hidden_states.message import EXTENSION_CLASS
from mesh.runtime import SystemClock
from penstock.testing.engine import GREEDY, EngineDriver
from services.cli.supervisor.local_mesh import DEMO_MODELS
from tests.mesh.running_mesh import free_port
from tests.vllm.moving import BLOCK_TOKENS, LONG, Side, move_in_mid_decode, prompt
from tests.vllm.test_attach import ALIKE, MODEL, vllm_serve
from tests.vllm.test_prefix_pull import pull

pytestmark = [pytest.mark.vllm, pytest.mark.ranks, pytest.mark.asyncio(loop_scope="module")]

EVENTS, REPLAY = 23557, 23567
"""Each core but the first has the port behind that of the one before."""
_GENERATED = re.compile(r'^vllm:generation_tokens_total\{engine="(\d)".*\} (\S+)', re.MULTILINE)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cores(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Side, Side]]:
    """Those of one server, each read by itself."""
    folder, port = tmp_path_factory.mktemp("cores"), free_port()
    control = f"ipc://{folder}/control"
    options = {"kv-transfer-config": kv_transfer_config(control), "worker-extension-cls": EXTENSION_CLASS}
    options |= {"data-parallel-size": "2"}
    with vllm_serve(folder, port, EVENTS, REPLAY, {**ALIKE, **options}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}):
        settings = AttachedSettings(
            f"http://127.0.0.1:{port}",
            model_path=str(DEMO_MODELS / MODEL),
            data_parallel_size=2,
            kv_events=f"tcp://127.0.0.1:{EVENTS}",
            kv_replay=f"tcp://127.0.0.1:{REPLAY}",
            control=control,
            start_s=900.0,
            answer_s=30.0,
        )
        whole = DataParallelAttached(settings, SystemClock())
        limits = [await core.start() for core in whole.cores]
        first, second = (
            Side(core, EngineDriver(core, limit, 300.0)) for core, limit in zip(engines_of(whole), limits, strict=True)
        )
        yield first, second
        await first.driver.close()
        await second.driver.close()
        await whole.stop()


def engines_of(whole: DataParallelAttached) -> tuple[AttachedEngine, ...]:
    engines = tuple(core for core in whole.cores if isinstance(core, AttachedEngine))
    assert len(engines) == len(whole.cores)
    return engines


async def generated(core: Side) -> dict[str, float]:
    """Tokens, by the core that generated them, as the server counts."""
    assert isinstance(core.engine, AttachedEngine)
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{core.engine.url}/metrics")).text
    return {number: float(count) for number, count in _GENERATED.findall(text)}


async def test_each_core_has_the_requests_that_are_sent_to_it(cores: tuple[Side, Side]) -> None:
    before = await generated(cores[0])
    await cores[1].driver.answer(prompt(40), replace(GREEDY, max_tokens=25))
    async with asyncio.timeout(30):
        # It counts a step after it has told the tokens.
        while (after := await generated(cores[0]))["1"] < before["1"] + 25:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert {number: after[number] - before[number] for number in after} == {"0": 0, "1": 25}


@pytest.mark.parametrize("upwards", [True, False])
async def test_a_request_moves_from_core_to_core(cores: tuple[Side, Side], upwards: bool) -> None:
    source, target = cores if upwards else cores[::-1]
    await move_in_mid_decode(source, target, 400, max_tokens=LONG, after=10)


async def test_a_prefix_is_pulled_from_the_core_that_has_it(cores: tuple[Side, Side]) -> None:
    first, second = cores
    shared, short = prompt(600), replace(GREEDY, max_tokens=16)
    blocks, name = 599 // BLOCK_TOKENS, EngineRequest("", shared, short)
    computed = await second.driver.answer(shared, short)
    await second.driver.until(lambda: cached(second, name) == blocks * BLOCK_TOKENS)
    assert cached(first, name) == 0
    assert await pull(second, first, shared) == blocks
    pulled = await first.driver.answer(shared, short)
    assert pulled.cached_tokens == blocks * BLOCK_TOKENS
    assert pulled.token_ids == computed.token_ids


def cached(core: Side, request: EngineRequest) -> int:
    assert isinstance(core.engine, AttachedEngine)
    return core.engine.cached_tokens(request)


async def test_hidden_states_come_from_both(cores: tuple[Side, Side]) -> None:
    engines = [core.engine for core in cores]
    told: set[int] = set()

    async def read() -> None:
        streams = [engine.hidden_states() for engine in engines if isinstance(engine, AttachedEngine)]
        async for number, states in merged(streams):
            assert any(states.states), "a state is not zero"
            told.add(number)

    for engine in engines:
        assert isinstance(engine, AttachedEngine)
        assert await engine.capture_hidden_states(2) == ""
    reading = asyncio.create_task(read())
    for core in cores:
        await core.driver.answer(prompt(50), replace(GREEDY, max_tokens=20))
    async with asyncio.timeout(30):
        while told != {0, 1}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    reading.cancel()
