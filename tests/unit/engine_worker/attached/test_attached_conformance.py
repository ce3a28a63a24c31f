"""An attached server owes the mesh what every engine does."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from controlplane.model.prefix_hash import block_hashes
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.attached.settings import AttachedSettings
from mesh.runtime import SystemClock
from penstock.testing.engine import GREEDY, EngineConformance, EngineDriver
from tests.unit.engine_worker.attached.fake_server import MODEL_PATH, FakeServer

pytestmark = [pytest.mark.slow, pytest.mark.live]


@pytest.mark.asyncio(loop_scope="class")
class TestAttachedEngine(EngineConformance):
    vocabulary = range(6, 640)
    eos_token_id = 2

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def driver(cls) -> AsyncIterator[EngineDriver]:
        # One end listens, the one whose endpoint has a *: here it is the server's.
        async with FakeServer(publishes="tcp://127.0.0.1:*") as server:
            settings = AttachedSettings(server.url, model_path=MODEL_PATH, kv_events=server.published_at, poll_s=0.02)
            engine = AttachedEngine(settings, SystemClock())
            driver = EngineDriver(engine, await engine.start(), cls.timeout_s)
            yield driver
            await driver.close()

    async def test_the_second_identical_prompt_hits_the_prefix_cache(self, driver: EngineDriver) -> None:
        """As for every engine, but vLLM tells of its cache on another socket, so a little later."""
        block = driver.limits.block_tokens
        prompt = self.prompt(3 * block + block // 2, seed=400)
        first = await driver.answer(prompt, GREEDY)
        await driver.until(lambda: driver.cached_hashes >= set(block_hashes(prompt, block)))
        second = await driver.answer(prompt, GREEDY)
        assert (first.cached_tokens, second.cached_tokens) == (0, 3 * block)
        assert second.token_ids == first.token_ids

    async def test_a_fully_cached_prompt_still_computes_its_last_token(self, driver: EngineDriver) -> None:
        block = driver.limits.block_tokens
        prompt = self.prompt(2 * block, seed=401)
        first = await driver.answer(prompt, GREEDY)
        await driver.until(lambda: driver.cached_hashes >= set(block_hashes(prompt, block)))
        second = await driver.answer(prompt, GREEDY)
        assert second.cached_tokens == block
        assert second.token_ids == first.token_ids
