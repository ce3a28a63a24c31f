"""The simulated engine: conformance, and what its clock promises."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from controlplane.model.instance import LoadReport
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams, StepOutput
from engine_worker.engines.interface import Engine
from engine_worker.engines.simulated import SimulatedEngine
from mesh.errors import ConfigurationError, EngineFailed, RequestRefused
from mesh.runtime import SystemClock
from penstock.testing.engine import EngineConformance
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, CostModel
from simulator.instance.config import InstanceConfig, OutputConfig

OUTPUT = OutputConfig(vocabulary_tokens=1000, first_token_id=6, last_token_id=999, eos_token_id=2, median_tokens=30)
CONFIG = InstanceConfig(
    block_tokens=16, kv_blocks=64, max_model_len_tokens=512, max_batch_requests=16, max_step_tokens=64, output=OUTPUT
)


@pytest.mark.live
class TestConformance(EngineConformance):
    vocabulary = range(6, 1000)
    eos_token_id = 2

    @classmethod
    async def create_engine(cls) -> Engine:
        return SimulatedEngine(CONFIG, LinearCost(), SystemClock(), time_scale=0.01)


class FakeTime:
    """A clock that jumps when somebody sleeps; every sleep ends `late_s` late."""

    def __init__(self, late_s: float = 0.0) -> None:
        self._now_s = 100.0
        self.late_s = late_s
        self.sleeps_s: list[float] = []

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        self.sleeps_s.append(duration_s)
        if duration_s > 0:
            self._now_s += duration_s + self.late_s
        await asyncio.sleep(0)


async def test_a_parameter_that_it_does_not_honour_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = SimulatedEngine(CONFIG, LinearCost(), SystemClock(), time_scale=0.01)
    await engine.start()
    for name in ("a", "b"):
        engine.submit(EngineRequest(name, (7, 8), SamplingParams(max_tokens=2, top_p=0.5, min_p=0.1)))
    await engine.stop()
    warnings = [vars(record)["parameter"] for record in caplog.records if hasattr(record, "parameter")]
    assert warnings == ["top_p", "min_p"]


def engine_in(
    time: FakeTime, cost: CostModel | None = None, config: InstanceConfig = CONFIG, time_scale: float = 1.0
) -> SimulatedEngine:
    return SimulatedEngine(config, cost or LinearCost(), time, time_scale=time_scale)


def request(request_id: str, tokens: int = 10, max_tokens: int = 20) -> EngineRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id, tuple(range(6, 6 + tokens)), sampling)


async def ended(outputs: AsyncIterator[StepOutput], requests: int = 1) -> list[StepOutput]:
    """All messages up to the one that ends the last of `requests`."""
    seen: list[StepOutput] = []
    async for output in outputs:
        seen.append(output)
        requests -= sum(delta.finish_reason is not None for delta in output.deltas)
        if not requests:
            return seen
    raise AssertionError("the outputs ended before the requests")


async def test_lateness_of_the_timer_does_not_add_up() -> None:
    time = FakeTime(late_s=0.002)
    engine = engine_in(time, LinearCost(fixed_ms=10.0, prefill_token_ms=0, decode_request_ms=0, context_token_ms=0))
    await engine.start()
    began_s = time.now_s()
    engine.submit(request("a", max_tokens=100))
    await ended(engine.outputs())
    assert time.now_s() - began_s == pytest.approx(100 * 0.010 + 0.002, abs=1e-4)
    await engine.stop()


async def test_time_scale_shortens_every_step() -> None:
    time = FakeTime()
    engine = engine_in(time, LinearCost(fixed_ms=50.0), time_scale=0.1)
    await engine.start()
    began_s = time.now_s()
    engine.submit(request("a", max_tokens=10))
    await ended(engine.outputs())
    assert time.now_s() - began_s == pytest.approx(10 * 0.005, rel=0.1)
    assert engine.load().step_ms == pytest.approx(5.0, rel=0.1)
    await engine.stop()


async def test_sleeps_below_a_millisecond_are_saved_up() -> None:
    time = FakeTime()
    engine = engine_in(time, LinearCost(fixed_ms=0.3, prefill_token_ms=0, decode_request_ms=0, context_token_ms=0))
    await engine.start()
    engine.submit(request("a", max_tokens=100))
    await ended(engine.outputs())
    real_sleeps = [seconds for seconds in time.sleeps_s if seconds > 0]
    assert min(real_sleeps) >= 0.001
    assert sum(real_sleeps) == pytest.approx(100 * 0.0003, abs=0.001)
    await engine.stop()


async def test_an_idle_engine_does_nothing() -> None:
    time = FakeTime()
    engine = engine_in(time)
    await engine.start()
    engine.submit(request("a"))
    await ended(engine.outputs())
    sleeps = len(time.sleeps_s)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(time.sleeps_s) == sleeps
    assert engine.load() == LoadReport(
        generated_tokens_total=20,
        prefilled_tokens_total=10,
        step_ms=engine.load().step_ms,
        finished_requests_total=1,
    )
    await engine.stop()


async def test_a_hopeless_lag_is_given_up_loudly(caplog: pytest.LogCaptureFixture) -> None:
    time = FakeTime(late_s=1.0)
    engine = engine_in(time, LinearCost(fixed_ms=10.0))
    await engine.start()
    with caplog.at_level(logging.WARNING):
        engine.submit(request("a", max_tokens=5))
        await ended(engine.outputs())
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "cannot keep its time" in caplog.text
    await engine.stop()


async def test_abort_in_the_midst_of_a_step_drops_the_step_s_token() -> None:
    time = FakeTime()
    engine = engine_in(time)
    await engine.start()
    engine.submit(request("a", max_tokens=400))
    outputs = engine.outputs()
    await anext(outputs)
    engine.abort("a")
    rest = [delta async for output in outputs_until_idle(engine, outputs) for delta in output.deltas]
    assert [delta.finish_reason for delta in rest].count(FinishReason.ABORT) == 1
    assert rest[-1].finish_reason is FinishReason.ABORT
    assert rest[-1].token_ids == ()
    engine.instance.validate()
    await engine.stop()


async def outputs_until_idle(engine: SimulatedEngine, outputs: AsyncIterator[StepOutput]) -> AsyncIterator[StepOutput]:
    async for output in outputs:
        yield output
        if engine.load().running_requests == 0:
            return


async def test_a_full_queue_refuses() -> None:
    config = InstanceConfig(
        kv_blocks=64, max_model_len_tokens=512, max_batch_requests=1, max_queued_requests=2, output=OUTPUT
    )
    engine = engine_in(FakeTime(), config=config)
    await engine.start()
    engine.submit(request("a"))
    engine.submit(request("b"))
    with pytest.raises(RequestRefused, match="full"):
        engine.submit(request("c"))
    assert len({delta.request_id for out in await ended(engine.outputs(), 2) for delta in out.deltas}) == 2
    await engine.stop()


async def test_stop_aborts_what_runs_and_ends_both_streams() -> None:
    engine = engine_in(FakeTime())
    await engine.start()
    for name in "abc":
        engine.submit(request(name, max_tokens=400))
    outputs = engine.outputs()
    await anext(outputs)
    await engine.stop()
    last = {delta.request_id: delta async for output in outputs for delta in output.deltas}
    assert {delta.finish_reason for delta in last.values()} == {FinishReason.ABORT}
    assert len(last) == 3
    changes = [change async for change in engine.kv_blocks()]
    assert len(changes) <= 1, "30 tokens fill one block"
    assert engine.load().kv_blocks_used == 0
    with pytest.raises(EngineFailed):
        engine.submit(request("d"))
    await engine.stop()


class BrokenCost(CostModel):
    def step_ms(self, batch: BatchShape) -> float:
        raise ZeroDivisionError("no such batch")


async def test_a_death_reaches_the_readers_and_submitters(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_in(FakeTime(), BrokenCost())
    await engine.start()
    engine.submit(request("a"))
    with pytest.raises(EngineFailed, match="no such batch"):
        await anext(engine.outputs())
    with pytest.raises(EngineFailed, match="no such batch"):
        await anext(engine.kv_blocks())
    with pytest.raises(EngineFailed, match="no such batch"):
        engine.submit(request("b"))
    assert "the simulated engine died" in caplog.text
    await engine.stop()


async def test_a_reader_that_lags_holds_the_engine_back() -> None:
    time = FakeTime()
    config = InstanceConfig(kv_blocks=512, max_model_len_tokens=8192, output=OUTPUT)
    engine = engine_in(time, config=config)
    await engine.start()
    engine.submit(request("a", max_tokens=3000))
    for _ in range(5000):
        await asyncio.sleep(0)
    assert engine.load().generated_tokens_total == 1024
    messages = await ended(engine.outputs())
    assert sum(len(delta.token_ids) for message in messages for delta in message.deltas) == 3000
    await engine.stop()


async def test_kv_changes_that_nobody_reads_become_one_account_of_everything() -> None:
    # Blocks of one token: every decode step changes the cache.
    config = InstanceConfig(block_tokens=1, kv_blocks=4096, max_model_len_tokens=4096, output=OUTPUT)
    engine = engine_in(FakeTime(), config=config)
    await engine.start()
    engine.submit(request("a", max_tokens=1500))
    await ended(engine.outputs())
    await engine.stop()
    changes = [change async for change in engine.kv_blocks()]
    assert changes[0].cleared
    assert not any(change.cleared for change in changes[1:])
    known = {block_hash for change in changes for block_hash in change.stored}
    assert known == set(engine.instance.cached_hashes)


def test_a_time_scale_of_zero_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        SimulatedEngine(CONFIG, LinearCost(), SystemClock(), time_scale=0.0)
