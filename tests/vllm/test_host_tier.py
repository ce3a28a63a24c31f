"""KV blocks of vLLM engines in the memory of their host: the same tokens, computed once."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import psutil
import pytest

from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.host_tier.shared_memory import SharedMemory
from engine_worker.host_tier.store import HostStore
from mesh.errors import EngineFailed
from penstock.testing.engine import GREEDY, EngineDriver
from tests.kv.peer import TOKEN
from tests.vllm.moving import SETTINGS, VOCABULARY

BLOCK_TOKENS = 32
BLOCKS = 12
SAMPLING = replace(GREEDY, max_tokens=6)
_ids = count()


@dataclass
class Running:
    engine: VllmEngine
    driver: EngineDriver

    @property
    def store(self) -> HostStore:
        assert self.engine.host_store is not None
        return self.engine.host_store

    async def answer(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
        """Its tokens, and how many of the prompt's were not computed."""
        answer = self.driver.submit_request(EngineRequest(f"host-{next(_ids)}", prompt, SAMPLING))
        await self.driver.end_of(answer)
        return tuple(answer.token_ids), answer.cached_tokens or 0

    async def saved(self, blocks: int) -> None:
        await until(lambda: self._saved() >= blocks)

    def _saved(self) -> int:
        self.store.changes()
        return len(self.store)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  another process changes it
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(settings: VllmSettings) -> AsyncIterator[Running]:
    engine = VllmEngine(settings)
    limits = await engine.start()
    driver = EngineDriver(engine, limits, 60.0)
    try:
        yield Running(engine, driver)
    finally:
        with suppress(EngineFailed):  # by a test that killed it
            await driver.close()


def prompt_of(seed: int, blocks: int = BLOCKS) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(VOCABULARY, k=blocks * BLOCK_TOKENS + 5))


def settings_in(directory: Path) -> VllmSettings:
    """So little KV memory that a few prompts evict all others."""
    return replace(
        SETTINGS,
        kv_cache_memory_bytes=12 << 20,
        max_model_len=1024,
        host_kv_bytes=64 << 20,
        host_kv_dir=str(directory / "host"),
    )


async def test_blocks_outlive_eviction_and_the_engine_and_wrong_ones_are_computed_anew(tmp_path: Path) -> None:
    settings, prompt = settings_in(tmp_path), prompt_of(1)
    others = set(psutil.Process(os.getpid()).children(recursive=True))  # of engines that other tests keep
    async with running(settings) as first:
        computed, cached = await first.answer(prompt)
        assert cached == 0
        await first.saved(BLOCKS)
        hashes = set(block_hashes(prompt, BLOCK_TOKENS))
        assert len(hashes) == BLOCKS

        blocks = first.engine._limits.kv_blocks  # type: ignore[union-attr]
        for seed in range(blocks // BLOCKS + 2):  # all of the engine's memory
            await first.answer(prompt_of(100 + seed))
        again, cached = await first.answer(prompt)
        assert (again, cached) == (computed, BLOCKS * BLOCK_TOKENS)
        # Once the core has said what it has loaded, which may be after the answer.
        await until(lambda: first.engine.load().host_hit_tokens_total == BLOCKS * BLOCK_TOKENS)
        assert first.engine.load().host_load_token_ms > 0
        again, cached = await first.answer(prompt)
        assert (again, cached) == (computed, BLOCKS * BLOCK_TOKENS)
        load = first.engine.load()
        assert load.host_hit_tokens_total == load.engine_hit_tokens_total == BLOCKS * BLOCK_TOKENS

        # A request that is taken back while it waits for its blocks leaves nothing pinned.
        for seed in range(blocks // BLOCKS + 2):
            await first.answer(prompt_of(200 + seed))
        request = EngineRequest("taken-back", prompt, SAMPLING)
        taken_back = first.driver.submit_request(request)
        await asyncio.sleep(0.001)
        first.engine.abort("taken-back")
        await first.driver.end_of(taken_back)
        again, _ = await first.answer(prompt)
        assert again == computed

        (core,) = [
            child
            for child in psutil.Process(os.getpid()).children(recursive=True)
            if child not in others and "resource_tracker" not in " ".join(child.cmdline())
        ]
        core.send_signal(signal.SIGKILL)
        await until(lambda: bool(first.engine._failure))
        with pytest.raises(EngineFailed):
            first.engine.submit(request)

    (path,) = (tmp_path / "host").glob("*.kv")
    async with running(settings) as second:
        # A peer pulls what only the host has: it is loaded, and nothing is computed.
        prefix = EngineRequest("held", prompt[: BLOCKS * BLOCK_TOKENS + 1], replace(SAMPLING, max_tokens=1))
        assert len(await second.engine.prefixes.hold("held", prefix, BLOCKS, 0.0, TOKEN)) == BLOCKS
        second.engine.prefixes.let_go("held")
        assert second.engine.load().prefilled_tokens_total <= 1
        unknown = replace(prefix, request_id="lacking", prompt_token_ids=prompt_of(400)[: BLOCKS * BLOCK_TOKENS + 1])
        assert await second.engine.prefixes.hold("lacking", unknown, BLOCKS, 0.0, TOKEN) == ()
        second.engine.prefixes.let_go("lacking")
        again, cached = await second.answer(prompt)
        assert (again, cached) == (computed, BLOCKS * BLOCK_TOKENS)
        change = second.store.changes()
        assert change is None or hashes <= set(change.stored)

    async with running(settings) as third:
        editor = opened(path)
        names = sorted(editor._index._ready, key=lambda name: editor._index._ready[name])
        slots = [editor._index._ready[name] for name in names]
        for slot in slots:
            if int(editor._index._entries["mesh_hash"][slot]) == block_hashes(prompt, BLOCK_TOKENS)[5]:
                editor.view(slot)[100] ^= 1
        again, cached = await third.answer(prompt)
        assert (again, cached) == (computed, 5 * BLOCK_TOKENS)
        assert third.store.corrupt_total == 1
        await third.answer(prompt_of(300))
        third.store.validate()
        pins = editor._index._entries["pins"]
        await until(lambda: not pins.any())
        editor.close()


def opened(path: Path) -> HostStore:
    """The store of this file, as another process would see it."""
    size = int.from_bytes(path.read_bytes()[16:24], "little")
    return HostStore(SharedMemory(path.parent, path.stem, size, 64 << 20, lock_s=5.0), only_looks=True)
