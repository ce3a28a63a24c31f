"""A simulated pooling model computes its prompts as any other and says vectors of them."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from controlplane.model.pooling import SEPARATED
from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engine_choice import make_engine
from engine_worker.engines.pooling import PoolingEngine, PoolingParameters, is_pooling, known_tasks, pair_form
from engine_worker.pooling import PoolingQueue
from engine_worker.settings import WorkerSettings
from mesh.errors import EngineFailed, QueueFull, RequestRefused
from mesh.runtime import SystemClock

EMBED = PoolingParameters("embed")


@pytest.fixture
async def engine() -> AsyncIterator[PoolingEngine]:
    args = ("runner=pooling", "embedding_dimensions=8", "time_scale=0.01", "instance.max_model_len_tokens=100")
    engine = make_engine(WorkerSettings("m", "/nowhere", engine="simulated", engine_arg=args), 0, SystemClock())
    await engine.start()
    assert is_pooling(engine)
    yield engine
    await engine.stop()


async def test_vectors_follow_from_the_tokens_alone(engine: PoolingEngine) -> None:
    first, second, other = await asyncio.gather(
        engine.pool("a", [5, 6], EMBED, 0), engine.pool("b", [5, 6], EMBED, 0), engine.pool("c", [7, 8], EMBED, 0)
    )
    assert first.shape == (8,)
    assert np.isclose(np.linalg.norm(first), 1.0)
    assert np.array_equal(first, second)
    assert not np.allclose(first, other)
    assert engine.load().running_requests == 0
    rows = await engine.pool("d", [5, 6], PoolingParameters("token_embed", dimensions=3, use_activation=False), 0)
    assert rows.shape == (2, 3)
    score = await engine.pool("e", [5, 6], PoolingParameters("classify"), 0)
    assert score.shape == (1,)
    assert 0 <= score[0] <= 1


async def test_what_it_cannot_do_is_refused(engine: PoolingEngine) -> None:
    for parameters in (PoolingParameters("token_classify"), PoolingParameters("embed", dimensions=9)):
        with pytest.raises(RequestRefused):
            await engine.pool("a", [5], parameters, 0)
    with pytest.raises(RequestRefused):
        await engine.pool("a", [5] * 200, EMBED, 0)
    with pytest.raises(RequestRefused, match="ask for embeddings"):
        engine.submit(EngineRequest("a", (5,), SamplingParams(max_tokens=1)))


async def test_a_prompt_can_be_taken_back_and_none_outlives_the_engine(engine: PoolingEngine) -> None:
    taken_back = asyncio.create_task(engine.pool("a", [5] * 90, EMBED, 0))
    waits = asyncio.create_task(engine.pool("b", [5] * 90, EMBED, 0))
    await asyncio.sleep(0)
    taken_back.cancel()
    await engine.stop()
    with pytest.raises(asyncio.CancelledError):
        await taken_back
    with pytest.raises(EngineFailed):
        await waits


@pytest.mark.live
async def test_the_queue_is_bounded_and_waited_for(engine: PoolingEngine) -> None:
    draining = False
    queue = PoolingQueue(engine, max_requests=3, is_draining=lambda: draining)
    running = asyncio.create_task(queue.pool("a", [[5], [6]], EMBED, 0))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 prompts are in the engine"):
        await queue.pool("b", [[5], [6]], EMBED, 0)
    for prompts in ([], [[5]] * 33):
        with pytest.raises(RequestRefused):
            await queue.pool("c", prompts, EMBED, 0)
    draining = True
    with pytest.raises(QueueFull, match="draining"):
        await queue.pool("d", [[5]], EMBED, 0)
    assert not asyncio.ensure_future(queue.drained()).done()
    assert len(await running) == 2
    async with asyncio.timeout(5):
        await queue.drained()


@pytest.mark.live
async def test_one_that_cannot_be_served_refuses_the_whole_call(engine: PoolingEngine) -> None:
    queue = PoolingQueue(engine, max_requests=9, is_draining=lambda: False)
    with pytest.raises(RequestRefused):
        await queue.pool("a", [[5], [5] * 200], EMBED, 0)
    async with asyncio.timeout(5):
        await queue.drained()


def test_the_first_task_is_what_a_model_is_for() -> None:
    assert known_tasks(("generate", "token_embed", "embed")) == ("embed", "token_embed")
    assert known_tasks(("token_embed", "embed"), "token_embed") == ("token_embed", "embed")
    assert known_tasks(("generate",), None) == ()


async def test_a_prompt_of_a_pair_says_where_its_first_text_ends(engine: PoolingEngine) -> None:
    queue = PoolingQueue(engine, max_requests=9, is_draining=lambda: False)
    seen: list[int | None] = []

    async def pool(_: str, token_ids: list[int], parameters: PoolingParameters, __: int) -> np.ndarray:  # type: ignore[type-arg]
        seen.append(parameters.first_segment_tokens)
        return np.array(token_ids, dtype=np.float32)

    engine.pool = pool  # type: ignore[assignment, method-assign]
    await queue.pool("a", [[5, 6], [7]], EMBED, 0, (1, 2))
    await queue.pool("b", [[5, 6]], EMBED, 0)
    assert seen == [1, 2, None]
    with pytest.raises(RequestRefused, match="1 lengths of segments for 2 prompts"):
        await queue.pool("c", [[5], [6]], EMBED, 0, (1,))


def test_workers_announce_how_their_model_takes_a_pair(engine: PoolingEngine) -> None:
    assert pair_form(engine) == SEPARATED
    generates = make_engine(WorkerSettings("m", "/nowhere", engine="simulated"), 0, SystemClock())
    assert pair_form(generates) == ""
