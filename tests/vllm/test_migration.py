"""Requests that move between two vLLM engines: their greedy output must not tell. The coordinator's part is played by
`Migration`, without its protocol."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from controlplane.model.request import EngineRequest
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from tests.engine_conformance import GREEDY, Answer, EngineDriver

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-large"
VOCABULARY = range(10, 600)
BLOCK_TOKENS = 32
DEADLINE_S = 10.0
_ids = count()


@dataclass
class Side:
    """One engine and its reader."""

    engine: VllmEngine
    driver: EngineDriver

    async def free_blocks(self) -> int:
        return await self.engine._moves.free_blocks()  # type: ignore[union-attr]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sides() -> AsyncIterator[tuple[Side, Side]]:
    settings = VllmSettings(
        model_path=str(MODEL), dtype="float32", block_tokens=BLOCK_TOKENS, kv_cache_bytes=96 << 20, max_step_tokens=256
    )
    engines = VllmEngine(settings), VllmEngine(settings)
    limits = await asyncio.gather(*(engine.start() for engine in engines))
    source, target = (
        Side(engine, EngineDriver(engine, limit, 60.0)) for engine, limit in zip(engines, limits, strict=True)
    )
    yield source, target
    await source.driver.close()
    await target.driver.close()


@dataclass
class Migration:
    """One request on its way."""

    source: Side
    target: Side
    request: EngineRequest
    answer: Answer
    migration_id: str = ""
    copied: int = 0
    progress: ExportProgress = field(default_factory=lambda: ExportProgress((), 0))

    def __post_init__(self) -> None:
        self.migration_id = f"move-{next(_ids)}"

    async def offer(self) -> None:
        await self.target.engine.reserve(self.migration_id, self.request)
        self.source.engine.export(self.request.request_id, self.migration_id, self._progressed)

    async def round(self) -> None:
        """Pull what is published and not yet copied."""
        progress = self.progress
        if len(progress.block_ids) > self.copied:
            covered = len(progress.block_ids) * BLOCK_TOKENS - len(self.request.prompt_token_ids)
            await self._pull(progress.block_ids, self.answer.token_ids[: max(0, covered)])

    async def pause(self) -> PausedRequest:
        paused = await self.source.engine.pause(self.request.request_id)
        assert paused is not None
        return paused

    async def hand_over(self, paused: PausedRequest) -> Answer:
        """Pull the last blocks and run the request at the target."""
        covered = paused.computed_tokens - len(self.request.prompt_token_ids)
        await self._pull(paused.block_ids, paused.emitted_token_ids[: max(0, covered)])
        answer = Answer()
        self.target.driver._answers[self.request.request_id] = answer
        self.target.engine.activate(self.migration_id, paused.emitted_token_ids, paused.computed_tokens)
        self.source.engine.release(self.request.request_id, self.migration_id)
        return answer

    async def _pull(self, block_ids: tuple[int, ...], emitted: tuple[int, ...]) -> None:
        await self.target.engine.pull(
            self.migration_id,
            self.source.engine.kv_address,
            self.copied,
            block_ids[self.copied :],
            emitted,
            DEADLINE_S,
        )
        self.copied = len(block_ids)

    def _progressed(self, progress: ExportProgress) -> None:
        assert len(progress.block_ids) >= len(self.progress.block_ids)
        self.progress = progress


def prompt(tokens: int) -> tuple[int, ...]:
    """Never seen before."""
    import random

    return tuple(random.Random(next(_ids)).choices(VOCABULARY, k=tokens))


async def begin(source: Side, target: Side, tokens: int, max_tokens: int, after: int) -> Migration:
    """A request that has emitted `after` tokens."""
    request = EngineRequest(f"moving-{next(_ids)}", prompt(tokens), replace(GREEDY, max_tokens=max_tokens))
    answer = source.driver.submit_request(request)
    await source.driver.until(lambda: len(answer.token_ids) >= after)
    return Migration(source, target, request, answer)


async def expected(side: Side, request: EngineRequest) -> tuple[int, ...]:
    return (await side.driver.answer(request.prompt_token_ids, request.sampling)).token_ids


@pytest.mark.parametrize("tokens", [100, 1000, 3000])
async def test_moved_in_mid_decode(sides: tuple[Side, Side], tokens: int) -> None:
    source, target = sides
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, tokens, 150, after=20)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= tokens // BLOCK_TOKENS)
    await migration.round()
    assert migration.copied >= tokens // BLOCK_TOKENS
    paused = await migration.pause()
    assert migration.answer.token_ids == paused.emitted_token_ids
    continued = await migration.hand_over(paused)
    await target.driver.end_of(continued)
    print(tokens, len(paused.emitted_token_ids), continued.cached_tokens, paused.computed_tokens)
    assert not migration.answer.ended.is_set()
    assert continued.deltas[0].offset == len(paused.emitted_token_ids)
    assert continued.cached_tokens == paused.computed_tokens
    assert migration.answer.token_ids + continued.token_ids == await expected(source, migration.request)
    await source.driver.until(lambda: source.engine.load().running_requests == 0)
    assert [await side.free_blocks() for side in sides] == free
