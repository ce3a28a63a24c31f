"""The simulated engine's blocks in the memory of its host."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from controlplane.model.adapter import Adapter
from controlplane.model.instance import KvBlocks
from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, TokenDelta
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.host_tier.names import block_names, root_name
from engine_worker.host_tier.settings import HostStores, HostTierSettings, parse_bytes
from engine_worker.host_tier.store import HostStore
from fault_simulation.host_memory import SimulatedHostMemory, SimulatedStoreMemory
from mesh.errors import ConfigurationError, HostTierUnavailable, RequestRefused
from mesh.runtime import SystemClock
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig

pytestmark = pytest.mark.live

CONFIG = InstanceConfig(kv_blocks=40, max_model_len_tokens=600, max_batch_requests=4, max_step_tokens=512)
PROMPT = tuple(range(100, 100 + 20 * CONFIG.block_tokens + 3))
FULL_BLOCKS = 20
HOST = HostTierSettings(1 << 20)


class Host:
    """A host, and engines on it."""

    def __init__(self, slots: int = 100, settings: HostTierSettings = HOST) -> None:
        self.settings = settings
        self.memory = SimulatedHostMemory("host", slots, CONFIG.block_bytes)
        self.is_up = True

    def open(self, key: str, block_bytes: int, settings: HostTierSettings) -> HostStore:
        if not self.is_up:
            raise HostTierUnavailable("there is no memory")
        return HostStore(SimulatedStoreMemory(self.memory, lambda: True))

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[SimulatedEngine]:
        engine = SimulatedEngine(
            CONFIG, LinearCost(), SystemClock(), time_scale=0.01, host=self.settings, stores=HostStores(self.open)
        )
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()


def request_of(prompt: tuple[int, ...] = PROMPT, request_id: str = "r", max_tokens: int = 4) -> EngineRequest:
    return EngineRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens, seed=1))


async def answer(engine: SimulatedEngine, request: EngineRequest) -> tuple[list[int], int, TokenDelta]:
    """Its tokens, how many of its prompt were cached, and the last delta."""
    engine.submit(request)
    return await rest_of(engine, request.request_id)


async def rest_of(engine: SimulatedEngine, request_id: str) -> tuple[list[int], int, TokenDelta]:
    tokens, cached = list[int](), 0
    async with asyncio.timeout(10):
        async for step in engine.outputs():
            for delta in step.deltas:
                if delta.request_id == request_id:
                    tokens += delta.token_ids
                    cached += delta.cached_tokens or 0
                    if delta.finish_reason is not None:
                        return tokens, cached, delta
    raise AssertionError("the engine ended")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  the store is memory that others change
            await asyncio.sleep(0.001)


def store_of(engine: SimulatedEngine) -> HostStore:
    store = engine.host_store
    assert store is not None
    return store


def saved(engine: SimulatedEngine, blocks: int) -> Callable[[], bool]:
    def is_saved() -> bool:
        store_of(engine).changes()
        return len(store_of(engine)) >= blocks

    return is_saved


async def test_what_one_instance_computed_another_one_loads() -> None:
    host = Host()
    async with host.engine() as one, host.engine() as other:
        computed, cached, _ = await answer(one, request_of())
        assert cached == 0
        await until(saved(one, FULL_BLOCKS))
        assert saved(other, FULL_BLOCKS)()
        loaded, cached, _ = await answer(other, request_of())
        assert loaded == computed
        assert cached == FULL_BLOCKS * CONFIG.block_tokens
        load = other.load()
        assert (load.host_hit_tokens_total, load.engine_hit_tokens_total) == (cached, 0)
        assert load.host_load_token_ms > 0
        await answer(other, request_of(request_id="again"))
        assert (other.load().host_hit_tokens_total, other.load().engine_hit_tokens_total) == (cached, cached)


async def test_what_was_evicted_and_what_a_former_life_computed_is_loaded() -> None:
    host = Host(slots=200)  # room for all that is computed here, however soon it is saved
    async with host.engine() as first:
        computed, _, _ = await answer(first, request_of())
        await until(saved(first, FULL_BLOCKS))
        for number in range(3):  # the whole memory of the engine
            await answer(first, request_of(tuple(range(500 + 1000 * number, 1000 + 1000 * number)), f"o{number}"))
        again, cached, _ = await answer(first, request_of(request_id="again"))
        assert again == computed
        assert cached == FULL_BLOCKS * CONFIG.block_tokens
    async with host.engine() as second:
        store_of(second).changes()
        again, cached, _ = await answer(second, request_of())
        assert again == computed
        assert cached == FULL_BLOCKS * CONFIG.block_tokens


async def test_what_the_host_has_forgotten_is_loaded_from_its_disk_even_after_a_restart(tmp_path: Path) -> None:
    on_disk = replace(HOST, disk_nbytes=1 << 24, disk_directory=str(tmp_path / "disk"))
    async with Host(settings=on_disk).engine() as first:
        computed, _, _ = await answer(first, request_of())
        disk = first.disk_store
        assert disk is not None
        await until(lambda: len(disk) >= FULL_BLOCKS)
    # Another memory of the host: the machine was started anew.
    async with Host(settings=on_disk).engine() as second:
        assert len(store_of(second)) == 0
        again, cached, _ = await answer(second, request_of())
        assert again == computed
        assert cached == FULL_BLOCKS * CONFIG.block_tokens
        load = second.load()
        assert (load.disk_hit_tokens_total, load.host_hit_tokens_total, load.engine_hit_tokens_total) == (cached, 0, 0)
        assert load.host_load_token_ms > 0


async def test_blocks_behind_a_changed_one_are_computed_anew() -> None:
    host = Host()
    async with host.engine() as one, host.engine() as other:
        computed, _, _ = await answer(one, request_of())
        await until(saved(one, FULL_BLOCKS))
        store = store_of(one)
        names = block_names(PROMPT, CONFIG.block_tokens, root_name("", ""))
        slots = store.pin(names)
        host.memory.blocks[slots[7]][3] ^= 1
        store.unpin(slots)
        assert saved(other, FULL_BLOCKS)()
        loaded, cached, _ = await answer(other, request_of())
        assert loaded == computed
        assert cached == 7 * CONFIG.block_tokens
        assert store.corrupt_total == 1
        store.validate()


@pytest.mark.parametrize(
    "other",
    [
        replace(request_of(), cache_salt="salt"),
        replace(request_of(), adapter=Adapter("a", "digest", "/a")),
        request_of((99, *PROMPT[1:])),
    ],
)
async def test_other_contents_are_not_loaded(other: EngineRequest) -> None:
    host = Host()
    async with host.engine() as engine:
        await answer(engine, request_of())
        await until(saved(engine, FULL_BLOCKS))
        names = block_names(other.prompt_token_ids, 16, root_name(other.cache_salt, other.adapter_digest))
        assert store_of(engine).leading(names) == 0


async def test_a_request_that_is_taken_back_while_it_waits_for_its_blocks_leaves_nothing() -> None:
    host = Host()
    async with host.engine() as one, host.engine() as other:
        await answer(one, request_of())
        await until(saved(one, FULL_BLOCKS))
        assert saved(other, FULL_BLOCKS)()
        other.submit(request_of())
        assert other.load().queued_requests == 1
        assert other.load().queued_prefill_tokens == len(PROMPT) - FULL_BLOCKS * CONFIG.block_tokens
        with pytest.raises(RequestRefused, match="in use"):
            other.submit(request_of())
        other.abort("r")
        _, _, last = await rest_of(other, "r")
        assert last.finish_reason is FinishReason.ABORT
        assert other.load().queued_requests == 0
        await asyncio.sleep(0)
        assert not host.memory.entries["pins"].any()
        assert other.instance.load().kv_blocks_used == 0
        assert (await answer(other, request_of()))[1] == FULL_BLOCKS * CONFIG.block_tokens
        other.instance.validate()


async def test_without_the_store_all_is_computed() -> None:
    host = Host()
    host.is_up = False
    async with host.engine() as engine:
        assert engine.host_store is None
        assert (await answer(engine, request_of()))[1] == 0
    host.is_up = True
    async with host.engine() as one, host.engine() as other:
        computed, _, _ = await answer(one, request_of())
        await until(saved(one, FULL_BLOCKS))
        assert saved(other, FULL_BLOCKS)()
        host.memory.is_locked = True
        again, cached, _ = await answer(other, request_of())
        assert (again, cached) == (computed, 0)


async def test_the_store_tells_of_its_blocks_by_the_hashes_of_the_mesh() -> None:
    host = Host()
    async with host.engine() as engine, host.engine() as other:
        await answer(engine, request_of(max_tokens=1))
        seen = set[int]()
        hashes = block_hashes(PROMPT, CONFIG.block_tokens)

        def has_all() -> bool:
            change: KvBlocks | None = store_of(other).changes()
            seen.update(change.stored if change is not None else ())
            return seen == set(hashes)

        await until(has_all)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("", 0), ("0", 0), ("8GiB", 8 << 30), ("1.5G", 3 << 29), ("512 MiB", 512 << 20), ("12", 12)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["much", "8 gigs", "-1", "8GiBs"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigurationError, match="8GiB"):
        parse_bytes(text)
