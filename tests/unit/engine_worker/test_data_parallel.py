"""An instance of several engine cores, made of simulated engines: it is one engine to the mesh, and its cores share
nothing."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.model.instance import KvBlocks, LoadReport
from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.data_parallel import CachedInAny, DataParallelEngine, together
from engine_worker.engines.interface import Engine
from engine_worker.engines.movable import ExportProgress, MovableEngine
from engine_worker.engines.prefix import PrefixEngine
from engine_worker.engines.simulated_movable import MovableSimulatedEngine
from engine_worker.kv.cores import at_core
from mesh.errors import ConfigurationError, EngineFailed, RequestRefused
from mesh.runtime import SystemClock
from penstock.testing.engine import GREEDY, EngineConformance, EngineDriver
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig
from simulator.instance.sequence import SequenceState
from tests.kv.peer import TOKEN

pytestmark = pytest.mark.live

OUTPUT = OutputConfig(vocabulary_tokens=1000, first_token_id=6, last_token_id=999, eos_token_id=2, median_tokens=30)
CONFIG = InstanceConfig(
    block_tokens=16, kv_blocks=64, max_model_len_tokens=512, max_batch_requests=16, max_step_tokens=64, output=OUTPUT
)
PROMPT = tuple(range(10, 110))
LONG = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)


class Core(MovableSimulatedEngine):
    """A simulated engine that is one of several cores."""

    def runs(self, request_id: str) -> bool:
        return self.instance.state_of(request_id) is not SequenceState.ENDED

    def cached_tokens(self, request: EngineRequest) -> int:
        return self.instance.cached_blocks(request) * CONFIG.block_tokens


def make(time_scale: float = 0.01) -> Core:
    return Core(CONFIG, LinearCost(), SystemClock(), time_scale=time_scale)


async def started(engine: Engine) -> EngineDriver:
    return EngineDriver(engine, await engine.start(), 20.0)


class TestConformance(EngineConformance):
    vocabulary = range(6, 1000)
    eos_token_id = 2

    @classmethod
    async def create_engine(cls) -> Engine:
        return DataParallelEngine([make(), make()])


async def test_it_holds_what_its_cores_hold_and_one_core_is_none_of_several() -> None:
    driver = await started(DataParallelEngine([make(), make(), make()]))
    assert (driver.limits.kv_blocks, driver.limits.max_batch_requests) == (3 * 64, 3 * 16)
    assert (driver.limits.max_model_len_tokens, driver.limits.data_parallel) == (512, 3)
    await driver.close()
    with pytest.raises(ConfigurationError, match="data parallelism of 1"):
        DataParallelEngine([make()])


async def test_requests_spread_and_a_prefix_stays_with_its_core() -> None:
    cores = make(), make()
    driver = await started(DataParallelEngine(cores))
    first = driver.submit(PROMPT, LONG)
    await driver.start_of(first)
    await driver.end_of(driver.submit(tuple(reversed(PROMPT)), GREEDY))
    assert [core.load().finished_requests_total for core in cores] == [0, 1]
    await driver.end_of(first)
    for _ in range(3):
        again = await driver.answer(PROMPT, GREEDY)
        assert again.cached_tokens == 96
    assert [core.load().finished_requests_total for core in cores] == [4, 1]
    await driver.close()


@pytest.mark.parametrize("several", ["source", "target", "both"])
async def test_a_request_moves_in_and_out_of_the_second_core(several: str) -> None:
    source: MovableEngine = make() if several == "target" else DataParallelEngine([make(), make()])
    target: MovableEngine = make() if several == "source" else DataParallelEngine([make(), make()])
    drivers = await started(source), await started(target)
    for driver in drivers:  # the first core of each is the busier one
        filler = driver.submit(tuple(range(500, 600)), LONG)
        await driver.start_of(filler)
    request = EngineRequest("moving", PROMPT, replace(LONG, max_tokens=120))
    answer = drivers[0].submit_request(request)
    told: list[ExportProgress] = []
    await drivers[0].until(lambda: len(answer.token_ids) > 5)
    await target.reserve("move", request)
    source.export("moving", "move", TOKEN, told.append)
    paused = await source.pause("moving")
    assert paused is not None
    core = {block_id >> 24 for block_id in (*told[-1].block_ids, *paused.block_ids)}
    assert core == ({0} if several == "target" else {1})
    peer, block_ids = at_core(source.kv_address, paused.block_ids, TOKEN)
    covered = paused.emitted_token_ids[: paused.computed_tokens - len(PROMPT)]
    await target.pull("move", peer, 0, block_ids, covered, 10.0)
    continued = drivers[1]._answers["moving"] = type(answer)()
    target.activate("move", paused.emitted_token_ids, paused.computed_tokens)
    source.release("moving", "move")
    await drivers[1].end_of(continued)
    assert len(answer.token_ids + continued.token_ids) == 120
    assert (await drivers[1].answer(PROMPT, request.sampling)).token_ids == answer.token_ids + continued.token_ids
    for driver in drivers:
        await driver.close()


async def test_a_prefix_is_pulled_from_the_core_that_has_it_and_its_request_follows_it() -> None:
    source: PrefixEngine = DataParallelEngine([make(), make()])
    target = DataParallelEngine([make(), make()])
    drivers = await started(source), await started(target)
    for driver in drivers:
        await driver.start_of(driver.submit(tuple(range(500, 600)), LONG))
    await drivers[0].answer(PROMPT, GREEDY)
    prefix = EngineRequest("pull", PROMPT[:97], GREEDY)
    held = await source.prefixes.hold("pull", prefix, 6, 0.0, TOKEN)
    assert {block_id >> 24 for block_id in held} == {1}
    peer, block_ids = at_core(source.kv_address, held, TOKEN)
    assert await target.prefixes.fetch("pull", prefix, peer, block_ids, 10.0) == 6
    source.prefixes.let_go("pull")
    assert (await drivers[1].answer(PROMPT, GREEDY)).cached_tokens == 96
    status = await target.kv_agent().status()
    assert (status.pulls_total, status.port, len(status.more_ports)) == (
        1,
        (await target.kv_agent().describe()).port,
        1,
    )
    for driver in drivers:
        await driver.close()


async def test_what_no_core_has_room_for_is_refused_and_the_next_core_is_tried_first() -> None:
    engine = DataParallelEngine([make(), make()])
    driver = await started(engine)
    request = EngineRequest("large", tuple(range(10, 500)), replace(GREEDY, max_tokens=4))
    for number in range(4):
        await engine.reserve(f"move-{number}", replace(request, request_id=f"large-{number}"))
    with pytest.raises(RequestRefused):
        await engine.reserve("move-4", replace(request, request_id="large-4"))
    for number in range(4):
        engine.discard(f"move-{number}")
    with pytest.raises(RequestRefused, match="nothing is reserved"):
        await engine.pull("move-0", engine.kv_address, 0, (), (), 1.0)
    await driver.close()


async def test_it_dies_with_any_of_its_cores() -> None:
    class Dying(Core):
        async def outputs(self):  # type: ignore[no-untyped-def, override]
            async for step in super().outputs():
                yield step
                raise EngineFailed("the process is gone")

    engine = DataParallelEngine([make(), Dying(CONFIG, LinearCost(), SystemClock(), time_scale=0.01)])
    await engine.start()
    for name in ("a", "b"):
        engine.submit(EngineRequest(name, (*PROMPT, ord(name)), LONG))
    with pytest.raises(EngineFailed, match="the process is gone"):
        await asyncio.wait_for(_end(engine), 20.0)
    await engine.stop()


async def _end(engine: Engine) -> None:
    async for _ in engine.outputs():
        continue


CHANGES = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.builds(
            KvBlocks,
            stored=st.lists(st.integers(0, 5), unique=True).map(tuple),
            removed=st.lists(st.integers(6, 9), unique=True).map(tuple),
            cleared=st.booleans(),
        )
        | st.builds(KvBlocks, removed=st.lists(st.integers(0, 5), unique=True).map(tuple)),
    )
)


@given(CHANGES)
def test_a_block_is_cached_while_any_core_has_it(changes: list[tuple[int, KvBlocks]]) -> None:
    union, told = CachedInAny(3), set[int]()
    caches: list[set[int]] = [set(), set(), set()]
    for cache, change in changes:
        if change.cleared:
            caches[cache].clear()
        caches[cache] -= set(change.removed)
        caches[cache] |= set(change.stored)
        if (news := union.apply(cache, change)) is not None:
            assert told.isdisjoint(news.stored)
            assert told.issuperset(news.removed)
            told = (told - set(news.removed)) | set(news.stored)
        assert told == set().union(*caches)


def test_the_load_of_an_instance_is_that_of_its_cores() -> None:
    one = LoadReport(running_requests=2, step_ms=4.0, decoding_requests=1, token_interval_ms=8.0, preemptions_total=1)
    other = LoadReport(running_requests=1, step_ms=6.0, decoding_requests=3, token_interval_ms=4.0)
    both = together([one, other])
    assert (both.running_requests, both.preemptions_total, both.step_ms, both.decoding_requests) == (3, 1, 6.0, 4)
    assert both.token_interval_ms == 5.0
