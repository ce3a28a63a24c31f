"""Two vLLM engines and a request on its way between them. The coordinator's part is played by `Migration`, without its
protocol."""

import asyncio
import random
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from controlplane.model.request import EngineRequest, SamplingParams
from engine_worker.engines.attached.engine import AttachedEngine
from engine_worker.engines.data_parallel import DataParallelEngine
from engine_worker.engines.movable import ExportProgress, PausedRequest
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from engine_worker.kv.cores import at_core
from penstock.testing.engine import GREEDY, Answer, EngineDriver
from tests.in_time import still
from tests.kv.peer import TOKEN

MODEL = Path(__file__).parents[2] / "demo" / "models" / "demo-large"
VOCABULARY = range(10, 600)
BLOCK_TOKENS = 32
DEADLINE_S = 10.0
LONG = 600
"""Tokens of an answer that is to go on while it is moved: a second's worth. An engine in a process of its own does not
wait while this one is held up, and a busy machine holds it up for a quarter of a second, which is 150 tokens."""
SHOWING = 64
"""Tokens after a move, two blocks of them, that show whether it carried what it should."""
_ids = count()


@dataclass
class Side:
    """One engine and its reader."""

    engine: VllmEngine | AttachedEngine | DataParallelEngine
    driver: EngineDriver

    async def free_blocks(self) -> int:
        cores = self.engine.cores if isinstance(self.engine, DataParallelEngine) else (self.engine,)
        return sum([await core._moves.free_blocks() for core in cores])  # type: ignore[attr-defined]


SETTINGS = VllmSettings(
    model_path=str(MODEL),
    dtype="float32",
    block_size=BLOCK_TOKENS,
    kv_cache_memory_bytes=96 << 20,
    max_num_batched_tokens=256,
    others=("structured_outputs_config.backend=xgrammar", "structured_outputs_config.disable_any_whitespace=true"),
)


@dataclass
class Migration:
    """One request on its way."""

    source: Side
    target: Side
    request: EngineRequest
    answer: Answer
    migration_id: str = ""
    copied: int = 0
    emitted_before: tuple[int, ...] = ()
    progress: ExportProgress = field(default_factory=lambda: ExportProgress((), 0))

    def __post_init__(self) -> None:
        self.migration_id = f"move-{next(_ids)}"

    async def offer(self) -> None:
        await self.target.engine.reserve(self.migration_id, self.request)
        still(not self.answer.ended.is_set(), "the request runs when it is offered")
        self.source.engine.export(self.request.request_id, self.migration_id, TOKEN, self._progressed)

    async def round(self) -> None:
        """Pull what is published and not yet copied."""
        progress = self.progress
        if len(progress.block_ids) > self.copied:
            covered = len(progress.block_ids) * BLOCK_TOKENS - len(self.request.prompt_token_ids)
            await self._pull(progress.block_ids, (self.emitted_before + self.answer.token_ids)[: max(0, covered)])

    async def pause(self) -> PausedRequest:
        paused = await self.source.engine.pause(self.request.request_id)
        still(paused is not None, "the request runs when it is paused")
        assert paused is not None
        return paused

    async def hand_off(self, paused: PausedRequest) -> Answer:
        """Pull the last blocks and run the request at the target."""
        covered = paused.computed_tokens - len(self.request.prompt_token_ids)
        await self._pull(paused.block_ids, paused.emitted_token_ids[: max(0, covered)])
        answer = Answer()
        self.target.driver._answers[self.request.request_id] = answer
        self.target.engine.activate(self.migration_id, paused.emitted_token_ids, paused.computed_tokens)
        self.source.engine.release(self.request.request_id, self.migration_id)
        return answer

    async def said(self, continued: Answer) -> tuple[int, ...]:
        """The answer's tokens before and after the move, once it shows whether the move went well."""
        await enough_of(self.target, self.request, continued)
        return self.answer.token_ids + continued.token_ids

    async def _pull(self, block_ids: tuple[int, ...], emitted: tuple[int, ...]) -> None:
        peer, peer_block_ids = at_core(self.source.engine.kv_address, block_ids[self.copied :], TOKEN)
        await self.target.engine.pull(self.migration_id, peer, self.copied, peer_block_ids, emitted, DEADLINE_S)
        self.copied = len(block_ids)

    def _progressed(self, progress: ExportProgress) -> None:
        assert len(progress.block_ids) >= len(self.progress.block_ids)
        self.progress = progress


def prompt(tokens: int) -> tuple[int, ...]:
    """Never seen before."""
    return tuple(random.Random(next(_ids)).choices(VOCABULARY, k=tokens))


async def begin(
    source: Side, target: Side, tokens: int, max_tokens: int, after: int, sampling: SamplingParams = GREEDY
) -> Migration:
    """A request that has emitted `after` tokens."""
    request = EngineRequest(f"moving-{next(_ids)}", prompt(tokens), replace(sampling, max_tokens=max_tokens))
    answer = source.driver.submit_request(request)
    await source.driver.until(lambda: len(answer.token_ids) >= after)
    return Migration(source, target, request, answer)


async def move_in_mid_decode(source: Side, target: Side, tokens: int, *, max_tokens: int, after: int) -> None:
    """The answer is that of an undisturbed request, and no block stays."""
    sides = source, target
    free = [await side.free_blocks() for side in sides]
    migration = await begin(source, target, tokens, max_tokens, after)
    await migration.offer()
    await source.driver.until(lambda: len(migration.progress.block_ids) >= tokens // BLOCK_TOKENS)
    await migration.round()
    paused = await migration.pause()
    assert migration.answer.token_ids == paused.emitted_token_ids
    said = await migration.said(continued := await migration.hand_off(paused))
    assert not migration.answer.ended.is_set()
    assert continued.cached_tokens == paused.computed_tokens
    assert paused.computed_tokens >= tokens + len(paused.emitted_token_ids) - 2
    assert said == await expected(source, migration.request, len(said))
    await all_free(sides, free)


async def all_free(sides: tuple[Side, Side], free: list[int]) -> None:
    """Wait until each block is free again; one freed twice would show as one too many."""
    async with asyncio.timeout(10.0):
        while [await side.free_blocks() for side in sides] != free:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert [await side.free_blocks() for side in sides] == free


async def enough_of(side: Side, request: EngineRequest, answer: Answer) -> None:
    """Wait for `SHOWING` more tokens and take the request back, unless it ends before: each of the others would be two
    steps, one of them for what is expected."""
    before = len(answer.token_ids)
    await side.driver.until(lambda: answer.ended.is_set() or len(answer.token_ids) >= before + SHOWING)
    side.engine.abort(request.request_id)
    await side.driver.end_of(answer)


async def expected(side: Side, request: EngineRequest, tokens: int | None = None) -> tuple[int, ...]:
    """What an undisturbed request is answered, at most so many tokens of it."""
    sampling = replace(request.sampling, max_tokens=tokens or request.sampling.max_tokens)
    return (await side.driver.answer(request.prompt_token_ids, sampling)).token_ids
