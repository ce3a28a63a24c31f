"""Samples for a length predictor, collected from vLLM: complete, of the right lengths, taken up where they stopped."""

import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from engine_worker.checkpoint_fingerprint import checkpoint_fingerprint
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.runtime import SystemClock
from services.cli.predictor.collecting import Collector
from services.cli.predictor.prompts import tokenised_prompts
from services.frontend.text.model_text import ModelText
from services.predictor.dataset import DatasetDescription, DatasetFolder

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-small"
EVERY = 5
MAX_TOKENS = 40


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(VllmSettings(model_path=str(MODEL), dtype="float32", max_num_seqs=8, movable=False))
    await engine.start()
    yield engine
    await engine.stop()


def description() -> DatasetDescription:
    return DatasetDescription(
        model="demo-small",
        model_fingerprint=checkpoint_fingerprint(MODEL),
        hidden_size=64,
        every_tokens=EVERY,
        source="demo tasks",
        seed=0,
        temperature=1.0,
        max_tokens=MAX_TOKENS,
        dtype="float32",
        part_requests=20,
    )


async def test_every_request_leaves_all_its_samples(engine: VllmEngine, tmp_path: Path) -> None:
    folder = DatasetFolder(tmp_path)
    prompts = list(tokenised_prompts(ModelText.load(MODEL, SystemClock().unix_s), None, 8, 60, seed=1))

    async def collect() -> Collector:
        collector = Collector(engine, folder, description(), prompts, 16, time.monotonic)
        await collector.run(folder.open(description()))
        return collector

    first = (await collect()).progress
    assert (first.done, first.skipped, first.failed, first.missing_samples) == (60, 0, 0, 0)
    dataset = folder.load()
    assert sum(dataset.requests.values()) == 60
    assert sorted(dataset.prompts.values()) == sorted(prompts)
    totals: dict[int, int] = {}
    for samples in dataset.splits.values():
        assert samples.states.shape[1] == 64
        assert np.isfinite(samples.states).all()
        for number in np.unique(samples.requests).tolist():
            own = samples.only(samples.requests == number)
            totals[number] = int(own.remaining_tokens[0])
            assert own.generated_tokens.tolist() == list(range(0, totals[number], EVERY))
            assert (own.prompt_tokens == len(dataset.prompts[number])).all()
    assert all(1 <= total <= MAX_TOKENS for total in totals.values())
    assert sum(totals.values()) == first.output_tokens
    # One may also end by itself with its last token.
    assert dataset.cut_requests <= {number for number, total in totals.items() if total == MAX_TOKENS}

    (tmp_path / "part-00001.safetensors").unlink()
    second = (await collect()).progress
    assert (second.done, second.skipped) == (20, 40)
    assert sorted(folder.load().prompts.values()) == sorted(prompts)
