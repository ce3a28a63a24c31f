"""Watching an engine's steps: exact samples, bounded queues, and an engine that is left alone without watchers."""

import asyncio

import numpy as np
import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.model.step_sample import StepSample
from engine_worker import wire
from engine_worker.engines.simulated import SimulatedEngine
from engine_worker.engines.vllm.load import LoadAccount, StepStats
from engine_worker.step_watch import MOST_SAMPLES, MOST_WATCHERS, StepWatches
from mesh.errors import RequestRefused
from simulator.cost.linear import LinearCost
from simulator.cost.model import BatchShape, PrefillChunk
from simulator.instance.config import InstanceConfig
from tests.unit.engine_worker.worker.fake_engine import FakeEngine

COST = LinearCost()


def sample(duration_ms: float) -> StepSample:
    return StepSample(duration_ms, 0, 0.0, 1, 10, 10)


class JumpingClock:
    """Time passes when somebody sleeps, at once."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def unix_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
        await asyncio.sleep(0)


async def simulated_samples(max_step_tokens: int) -> list[StepSample]:
    """Of one request of 100 prompt and 4 answer tokens, on a clock that jumps."""
    config = InstanceConfig(max_step_tokens=max_step_tokens, max_batch_requests=8)
    engine = SimulatedEngine(config, COST, JumpingClock(), time_scale=0.5)
    seen: list[StepSample] = []
    await engine.start()
    watches = StepWatches(engine)
    with watches.watch() as watch:
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        engine.submit(EngineRequest("r", tuple(range(3, 103)), sampling))
        async for step in engine.outputs():
            if any(delta.finish_reason for delta in step.deltas):
                break
        seen += (await watch.take()).samples
    await engine.stop()
    return seen


async def test_a_simulated_engine_tells_each_step_as_it_was() -> None:
    seen = await simulated_samples(max_step_tokens=64)
    assert [(each.prefill_tokens, each.decode_requests, each.context_tokens) for each in seen] == [
        (64, 0, 0),
        (36, 0, 0),
        (0, 1, 101),
        (0, 1, 102),
        (0, 1, 103),
    ]
    chunk = BatchShape((PrefillChunk(36, 64),))
    assert seen[1].duration_ms == pytest.approx(COST.step_ms(chunk) * 0.5)
    assert seen[1].attended_pairs == 36 * (64 + 37 / 2)
    decode = BatchShape(decode_context_tokens=np.array([102]), decode_context_tokens_sum=102)
    assert seen[3].duration_ms == pytest.approx(COST.step_ms(decode) * 0.5)


def test_what_vllm_says_makes_a_sample() -> None:
    account = LoadAccount(kv_blocks=64)
    account.submitted("a", 100, 0, 0, now_s=1.0)
    account.stepped(StepStats(1, 0.1, 64, 0, 0), now_s=1.5)
    assert account.step_sample() == StepSample(500.0, 64, 64 * 65 / 2, 0, 0, 0)
    account.stepped(StepStats(1, 0.1, 36, 0, 0), now_s=2.0)
    assert account.step_sample() == StepSample(500.0, 36, 36 * (64 + 37 / 2), 0, 0, 0)
    account.produced("a", 1)
    account.submitted("b", 10, 0, 0, now_s=2.0)
    account.stepped(StepStats(2, 0.1, 10, 1, 0), now_s=2.25)
    assert account.step_sample() == StepSample(250.0, 10, 55.0, 1, 101, 101)
    account.produced("a", 1)
    account.produced("b", 1)
    account.stepped(StepStats(2, 0.1, 0, 2, 0), now_s=2.5)
    assert account.step_sample() == StepSample(250.0, 0, 0.0, 2, 102 + 11, 102)
    account.stepped(StepStats(2, 0.1, 0, 0, 0), now_s=2.6)
    assert account.step_sample() is None


async def test_a_slow_watcher_loses_the_oldest_and_hears_how_many() -> None:
    engine = FakeEngine()
    told: list[object] = []
    engine.watch_steps = told.append  # type: ignore[attr-defined]
    watches = StepWatches(engine)
    with watches.watch() as slow, watches.watch() as other:
        observe = told[-1]
        assert callable(observe)
        for number in range(MOST_SAMPLES + 3):
            observe(sample(float(number)))
        batch = await slow.take()
        assert (len(batch.samples), batch.lost, batch.samples[0].duration_ms) == (MOST_SAMPLES, 3, 3.0)
        observe(sample(1.0))
        again = await slow.take()
        assert (len(again.samples), again.lost) == (1, 0)
        assert (await other.take()).lost == 4
        assert wire.step_samples_message(batch).lost == 3
    assert told[-1] is None, "without watchers the engine is left alone"


def test_watchers_are_few_and_not_every_engine_tells() -> None:
    with pytest.raises(RequestRefused, match="does not tell"), StepWatches(FakeEngine()).watch():
        pass
    engine = FakeEngine()
    engine.watch_steps = lambda _: None  # type: ignore[attr-defined]
    watches = StepWatches(engine)
    open_watches = [watches.watch() for _ in range(MOST_WATCHERS)]
    for each in open_watches:
        each.__enter__()
    with pytest.raises(RequestRefused, match="others watch"), watches.watch():
        pass
