"""Hidden states captured from vLLM against transformers' own forward pass, row by row, on a demo model."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.hidden_state_source import HiddenStates, has_hidden_states
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MODEL = Path(__file__).resolve().parents[2] / "demo" / "models" / "demo-small"
STEP_TOKENS = 32
"""Less than the longest prompt, so that prompts are computed in chunks beside decoding requests."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    settings = VllmSettings(
        model_path=str(MODEL), dtype="float32", max_num_seqs=8, max_num_batched_tokens=STEP_TOKENS, movable=False
    )
    engine = VllmEngine(settings)
    await engine.start()
    yield engine
    await engine.stop()


class Listener:
    """Rows as they come, by request and context length."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, NDArray[np.float32]]] = {}
        self.steps: list[int] = []

    async def listen(self, engine: VllmEngine) -> None:
        async for batch in engine.hidden_states():
            self.take(batch)

    def take(self, batch: HiddenStates) -> None:
        states = np.frombuffer(batch.states, "<f4").reshape(len(batch.request_ids), batch.hidden_size)
        self.steps.append(batch.step)
        for request_id, context_tokens, state in zip(batch.request_ids, batch.context_tokens, states, strict=True):
            assert context_tokens not in self.rows.setdefault(request_id, {}), "a state came twice"
            self.rows[request_id][context_tokens] = state


def requests(count: int) -> list[EngineRequest]:
    """Of very different lengths, so that rows of a batch change places as requests come and go."""
    draw = np.random.default_rng(5)
    made = []
    for index in range(count):
        prompt = tuple(int(token) for token in draw.integers(10, 600, size=int(draw.integers(2, 90))))
        sampling = SamplingParams(max_tokens=int(draw.integers(1, 40)), temperature=1.0, ignore_eos=True)
        made.append(EngineRequest(f"request-{index}", prompt, sampling))
    return made


async def serve(engine: VllmEngine, asked: list[EngineRequest]) -> dict[str, tuple[int, ...]]:
    """The generated tokens of each; a fresh request is submitted whenever one ends, beyond the first few."""
    waiting = list(asked)
    generated: dict[str, tuple[int, ...]] = {}
    unfinished = len(asked)
    for _ in range(3):
        engine.submit(waiting.pop(0))
    async for step in engine.outputs():
        for delta in step.deltas:
            generated[delta.request_id] = generated.get(delta.request_id, ()) + delta.token_ids
            if delta.finish_reason is not None:
                unfinished -= 1
                for _ in range(2):
                    if waiting:
                        engine.submit(waiting.pop(0))
        if not unfinished:
            return generated
    raise AssertionError("the engine ended its output")


def expected_states(token_ids: tuple[int, ...]) -> NDArray[np.float32]:
    """transformers' last hidden state (after the final norm) of every token."""
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    with torch.no_grad():
        states: NDArray[np.float32] = model(torch.tensor([token_ids])).last_hidden_state[0].numpy()
    return states


async def test_every_row_is_its_request_s_own_state(engine: VllmEngine) -> None:
    is_source = has_hidden_states(engine)  # asserted apart: a type guard would make it a mere source
    assert is_source
    assert await engine.capture_hidden_states(1, lossless=True) == ""
    listener = Listener()
    listening = asyncio.create_task(listener.listen(engine))
    asked = requests(16)
    generated = await serve(engine, asked)
    await asyncio.wait_for(
        _until(lambda: all(len(listener.rows.get(each, ())) == len(generated[each]) for each in generated)), 10
    )
    assert await engine.capture_hidden_states(0) == ""
    listening.cancel()

    widest = 0.0
    for request in asked:
        context = request.prompt_token_ids + generated[request.request_id]
        rows = listener.rows[request.request_id]
        # One state per generated token, the first that of the whole prompt; what is sampled last is never fed.
        assert sorted(rows) == list(range(len(request.prompt_token_ids), len(context)))
        expected = expected_states(context)
        for context_tokens, state in rows.items():
            widest = max(widest, float(np.abs(state - expected[context_tokens - 1]).max()))
    assert 0 < widest < 1e-3, "the states are those of transformers, up to the order of additions"


async def test_states_come_every_kth_step_and_not_after_the_capture_ended(engine: VllmEngine) -> None:
    assert await engine.capture_hidden_states(7) == ""
    listener = Listener()
    listening = asyncio.create_task(listener.listen(engine))
    sampling = SamplingParams(max_tokens=50, ignore_eos=True)
    await serve(engine, [EngineRequest(f"seventh-{index}", (20, 21, 22), sampling) for index in range(3)])
    await asyncio.wait_for(_until(lambda: len(listener.steps) >= 7), 10)
    assert all(later - earlier == 7 for earlier, later in zip(listener.steps, listener.steps[1:], strict=False))
    assert await engine.capture_hidden_states(0) == ""
    seen = len(listener.steps)
    await serve(engine, [EngineRequest(f"unseen-{index}", (20, 21, 22), sampling) for index in range(3)])
    assert len(listener.steps) == seen
    listening.cancel()


async def _until(condition: object) -> None:
    assert callable(condition)
    while not condition():  # noqa: ASYNC110  what another process sends offers nothing to await
        await asyncio.sleep(0.01)
