"""A demo model converted to a pooling model, on vLLM."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engine_choice import make_engine
from engine_worker.engines.pooling import PoolingEngine, PoolingParameters, is_pooling
from engine_worker.settings import WorkerSettings
from mesh.errors import RequestRefused
from mesh.runtime import SystemClock

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-small"
ARGS = ("runner=pooling", "convert=embed", "dtype=float32", "max_model_len=256", "kv_cache_memory_bytes=67108864")

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[PoolingEngine]:
    engine = make_engine(WorkerSettings("m", str(MODEL), engine="vllm", engine_arg=ARGS), 0, SystemClock())
    await engine.start()
    assert is_pooling(engine)
    yield engine
    await engine.stop()


async def test_a_converted_model_embeds(engine: PoolingEngine) -> None:
    assert engine.pooling_tasks == ("embed", "token_embed")
    first = await engine.pool("a", [5, 6, 7], PoolingParameters("embed"), 0)
    again = await engine.pool("b", [5, 6, 7], PoolingParameters("embed"), 0)
    other = await engine.pool("c", [9, 8], PoolingParameters("embed"), 0)
    assert np.isclose(np.linalg.norm(first), 1.0, atol=1e-5)
    assert np.allclose(first, again, atol=1e-5)
    assert not np.allclose(first, other, atol=1e-2)
    rows = await engine.pool("d", [5, 6, 7], PoolingParameters("token_embed"), 0)
    assert rows.shape == (3, first.size)
    assert np.allclose(rows[-1], first, atol=1e-4), "this model pools by its last token"


async def test_what_it_cannot_do_is_refused(engine: PoolingEngine) -> None:
    for token_ids, parameters in (
        ([5], PoolingParameters("classify")),
        ([5], PoolingParameters("embed", dimensions=8)),
        ([5] * 300, PoolingParameters("embed")),
    ):
        with pytest.raises(RequestRefused):
            await engine.pool("e", token_ids, parameters, 0)
    with pytest.raises(RequestRefused, match="ask for embeddings"):
        engine.submit(EngineRequest("f", (5,), SamplingParams(max_tokens=1)))
