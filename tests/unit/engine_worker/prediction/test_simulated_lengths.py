"""The simulated engine tells the truth about its requests' lengths, spoilt as it was told to."""

import asyncio

import pytest

from controlplane.model.request import EngineRequest, SamplingParams
from controlplane.prediction.length_error import LengthErrorModel
from engine_worker.engines.predicted_lengths import PredictedLength, predicts_lengths
from engine_worker.engines.simulated_lengths import LengthPredictingSimulatedEngine
from engine_worker.settings import WorkerSettings
from mesh.runtime import SystemClock
from simulator.cost.linear import LinearCost
from simulator.instance.config import InstanceConfig, OutputConfig

pytestmark = pytest.mark.live

OUTPUT = OutputConfig(vocabulary_tokens=1000, first_token_id=6, last_token_id=999, eos_token_id=2, median_tokens=60)
CONFIG = InstanceConfig(kv_blocks=256, max_model_len_tokens=512, max_batch_requests=16, output=OUTPUT)


def engine(error: LengthErrorModel | None) -> LengthPredictingSimulatedEngine:
    return LengthPredictingSimulatedEngine(CONFIG, LinearCost(), SystemClock(), length_error=error, time_scale=0.001)


async def lengths_and_told(
    running: LengthPredictingSimulatedEngine, every_steps: int
) -> tuple[dict[str, int], list[PredictedLength]]:
    """What ten requests came to, and all that was predicted of them."""
    assert running.enable_length_predictions(every_steps)
    await running.start()
    told: list[PredictedLength] = []

    async def listen() -> None:
        async for lengths in running.length_predictions():
            told.extend(lengths)

    listening = asyncio.create_task(listen())
    for index in range(10):
        sampling = SamplingParams(max_tokens=200, temperature=0.0)
        running.submit(EngineRequest(f"r{index}", tuple(range(6, 20 + index)), sampling))
    totals: dict[str, int] = {}
    ended = 0
    async for step in running.outputs():
        for delta in step.deltas:
            totals[delta.request_id] = delta.offset + len(delta.token_ids)
            ended += delta.finish_reason is not None
        if ended == 10:
            break
    await running.stop()
    await listening
    return totals, told


async def test_an_oracle_predicts_every_length() -> None:
    running = engine(LengthErrorModel(sigma=0.0))
    assert predicts_lengths(running)
    totals, told = await lengths_and_told(running, 1)
    assert len(told) > 50
    for length in told:
        assert length.generated_tokens + length.remaining_tokens == totals[length.request_id]
    assert {length.request_id for length in told} == {name for name, total in totals.items() if total > 1}


async def test_errors_are_those_of_the_model() -> None:
    error = LengthErrorModel(sigma=0.5, seed=3)
    totals, told = await lengths_and_told(engine(error), 5)
    assert told
    for length in told:
        true = totals[length.request_id] - length.generated_tokens
        assert length.remaining_tokens == error.predict(length.request_id, length.generated_tokens, true)


@pytest.mark.parametrize(("options", "expected"), [((), True), (("predict_lengths=false",), False)])
def test_it_can_be_turned_off(options: tuple[str, ...], expected: bool) -> None:
    from engine_worker.engine_choice import make_engine

    settings = WorkerSettings(model="m", model_path="/nowhere", engine="simulated", engine_arg=options)
    made = make_engine(settings, 0, SystemClock())
    assert predicts_lengths(made)
    assert made.enable_length_predictions(20) is expected
