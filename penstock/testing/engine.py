"""What every engine owes the mesh.

    class TestPaced(EngineConformance):
        engine = "paced"
        options = ("step_ms=0.1", "max_model_len_tokens=512")
        model_path = "demo/models/demo-small"
        vocabulary = range(6, 640)
        eos_token_id = 2

Engines are made by name, as a worker makes them, so the package must be installed; a subclass may override
`create_engine` instead.

One engine serves the whole class, on one event loop; tests use prompts of their own and leave nothing running.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import pytest_asyncio

from controlplane.model.instance import LoadReport
from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, FinishReason, PositionLogprobs, SamplingParams, TokenDelta
from engine_worker.engine_choice import make_engine
from engine_worker.engines.interface import Engine, EngineLimits
from engine_worker.settings import WorkerSettings
from mesh.errors import RequestRefused
from mesh.runtime import SystemClock

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@dataclass
class Answer:
    """What came of one request so far."""

    deltas: list[TokenDelta] = field(default_factory=list)
    seen_at_message: list[int] = field(default_factory=list)
    """Number of the engine's message that brought each delta."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token_id for delta in self.deltas for token_id in delta.token_ids)

    @property
    def logprobs(self) -> tuple[PositionLogprobs, ...]:
        return tuple(position for delta in self.deltas for position in delta.logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason

    @property
    def cached_tokens(self) -> int:
        assert self.deltas[0].cached_tokens is not None, "the first delta tells the cached tokens"
        return self.deltas[0].cached_tokens


class EngineDriver:
    """Reads an engine's two streams and sorts them by request, checking what must hold of every message."""

    def __init__(self, engine: Engine, limits: EngineLimits, timeout_s: float) -> None:
        self.engine = engine
        self.limits = limits
        self.cached_hashes: set[int] = set()
        self.messages = 0
        self._timeout_s = timeout_s
        self._answers: dict[str, Answer] = {}
        self._ids = count()
        self._changed = asyncio.Event()
        self._readers = (asyncio.create_task(self._read_outputs()), asyncio.create_task(self._read_kv_blocks()))

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, emitted: Sequence[int] = ()) -> Answer:
        """Submit a request under a fresh id."""
        return self.submit_request(
            EngineRequest(f"request-{next(self._ids)}", tuple(prompt), sampling, emitted_token_ids=tuple(emitted))
        )

    def submit_request(self, request: EngineRequest) -> Answer:
        answer = Answer()
        self._answers[request.request_id] = answer
        try:
            self.engine.submit(request)
        except RequestRefused:
            del self._answers[request.request_id]
            raise
        return answer

    async def answer(self, prompt: Sequence[int], sampling: SamplingParams, emitted: Sequence[int] = ()) -> Answer:
        """Submit and wait for the end."""
        answer = self.submit(prompt, sampling, emitted)
        await self.end_of(answer)
        return answer

    async def end_of(self, answer: Answer) -> None:
        async with asyncio.timeout(self._timeout_s):
            await answer.ended.wait()

    async def start_of(self, answer: Answer) -> None:
        async with asyncio.timeout(self._timeout_s):
            await answer.started.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that the engine may tell a little after the last token."""
        async with asyncio.timeout(self._timeout_s):
            while not holds():
                self._changed.clear()
                # The load has no stream to wait on, hence the look every now and then.
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.02)
                except TimeoutError:
                    continue

    async def close(self) -> None:
        """Stop the engine; both streams must end by themselves."""
        await self.engine.stop()
        async with asyncio.timeout(self._timeout_s):
            await asyncio.gather(*self._readers)

    async def _read_outputs(self) -> None:
        async for output in self.engine.outputs():
            self.messages += 1
            ids = [delta.request_id for delta in output.deltas]
            assert len(set(ids)) == len(ids), f"two deltas of one request in one message: {ids}"
            for delta in output.deltas:
                answer = self._answers[delta.request_id]
                assert not answer.ended.is_set(), f"a delta after the end of {delta.request_id}: {delta}"
                answer.deltas.append(delta)
                answer.seen_at_message.append(self.messages)
                answer.started.set()
                if delta.finish_reason is not None:
                    answer.ended.set()
            self._changed.set()

    async def _read_kv_blocks(self) -> None:
        async for change in self.engine.kv_blocks():
            if change.cleared:
                self.cached_hashes.clear()
            self.cached_hashes.difference_update(change.removed)
            self.cached_hashes.update(change.stored)
            self._changed.set()


@pytest.mark.asyncio(loop_scope="class")
class EngineConformance:
    """Subclass and set what stands first; the rest is inherited."""

    engine: str
    """The name that operators use."""
    options: tuple[str, ...] = ()
    """As `--engine-arg` takes them: NAME=VALUE."""
    model_path: str = ""
    """Directory of the model."""
    vocabulary: range
    """Token ids that prompts may use and that come out."""
    eos_token_id: int
    timeout_s: float = 20.0
    abort_lag_messages: int = 2
    """Messages between an abort and its delta: those of the step under way and of the one after it."""

    @classmethod
    async def create_engine(cls) -> Engine:
        """A fresh engine, not started."""
        settings = WorkerSettings("model", cls.model_path, engine=cls.engine, engine_arg=cls.options)
        return make_engine(settings, seed=0, clock=SystemClock())

    def ending_prompt(self) -> tuple[int, ...]:
        """A prompt whose greedy answer ends by itself within 512 tokens."""
        return self.prompt(12, seed=1)

    def prompt(self, tokens: int, seed: int) -> tuple[int, ...]:
        """Random but fixed token ids."""
        return tuple(random.Random(f"{tokens}/{seed}").choices(self.vocabulary, k=tokens))

    @pytest_asyncio.fixture(scope="class", loop_scope="class")
    @classmethod
    async def driver(cls) -> AsyncIterator[EngineDriver]:
        engine = await cls.create_engine()
        driver = EngineDriver(engine, await engine.start(), cls.timeout_s)
        yield driver
        await driver.close()

    async def test_greedy_answers_repeat(self, driver: EngineDriver) -> None:
        prompt = self.prompt(20, seed=10)
        first = await driver.answer(prompt, GREEDY)
        second = await driver.answer(prompt, GREEDY)
        assert first.token_ids == second.token_ids
        assert set(first.token_ids) <= {*self.vocabulary, self.eos_token_id}

    async def test_different_prompts_are_answered_differently(self, driver: EngineDriver) -> None:
        answers = [await driver.answer(self.prompt(20, seed=seed), GREEDY) for seed in range(20, 26)]
        assert len({answer.token_ids for answer in answers}) > 1

    async def test_offsets_are_contiguous(self, driver: EngineDriver) -> None:
        answer = await driver.answer(self.prompt(20, seed=30), GREEDY)
        expected = 0
        for delta in answer.deltas:
            assert delta.offset == expected
            expected += len(delta.token_ids)
        assert [delta.finish_reason for delta in answer.deltas[:-1]] == [None] * (len(answer.deltas) - 1)
        assert all(delta.cached_tokens is None for delta in answer.deltas[1:])

    @pytest.mark.parametrize("max_tokens", [1, 2, 17])
    async def test_max_tokens_ends_with_length(self, driver: EngineDriver, max_tokens: int) -> None:
        answer = await driver.answer(self.prompt(9, seed=40), replace(GREEDY, max_tokens=max_tokens))
        assert len(answer.token_ids) == max_tokens
        assert answer.finish_reason is FinishReason.LENGTH

    async def test_the_end_of_sequence_stops_and_is_reported(self, driver: EngineDriver) -> None:
        answer = await driver.answer(self.ending_prompt(), replace(GREEDY, max_tokens=512, ignore_eos=False))
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == self.eos_token_id
        assert self.eos_token_id not in answer.token_ids[:-1]

    async def test_ignore_eos_goes_on_to_max_tokens(self, driver: EngineDriver) -> None:
        ending = await driver.answer(self.ending_prompt(), replace(GREEDY, max_tokens=512, ignore_eos=False))
        wanted = len(ending.token_ids) + 8
        answer = await driver.answer(self.ending_prompt(), replace(GREEDY, max_tokens=wanted))
        assert len(answer.token_ids) == wanted
        assert answer.finish_reason is FinishReason.LENGTH

    async def test_min_tokens_holds_off_the_end(self, driver: EngineDriver) -> None:
        ending = await driver.answer(self.ending_prompt(), replace(GREEDY, max_tokens=512, ignore_eos=False))
        wanted = len(ending.token_ids) + 5
        sampling = replace(GREEDY, max_tokens=wanted + 40, min_tokens=wanted, ignore_eos=False)
        answer = await driver.answer(self.ending_prompt(), sampling)
        assert len(answer.token_ids) >= wanted
        assert self.eos_token_id not in answer.token_ids[:wanted]

    async def test_a_stop_token_stops_at_its_first_appearance(self, driver: EngineDriver) -> None:
        prompt = self.prompt(14, seed=50)
        undisturbed = (await driver.answer(prompt, GREEDY)).token_ids
        stop = undisturbed[len(undisturbed) // 2]
        answer = await driver.answer(prompt, replace(GREEDY, stop_token_ids=(stop,)))
        assert answer.token_ids == undisturbed[: undisturbed.index(stop) + 1]
        assert answer.finish_reason is FinishReason.STOP

    async def test_min_tokens_holds_off_stop_tokens(self, driver: EngineDriver) -> None:
        prompt = self.prompt(14, seed=51)
        stop = (await driver.answer(prompt, GREEDY)).token_ids[2]
        answer = await driver.answer(prompt, replace(GREEDY, stop_token_ids=(stop,), min_tokens=10))
        assert len(answer.token_ids) >= 10
        assert stop not in answer.token_ids[:10]

    async def test_seeds_reproduce(self, driver: EngineDriver) -> None:
        prompt = self.prompt(16, seed=60)
        sampling = replace(GREEDY, temperature=1.5)
        answers = [
            [(await driver.answer(prompt, replace(sampling, seed=seed))).token_ids for _ in range(2)]
            for seed in (7, 8, 9, 10)
        ]
        assert all(first == second for first, second in answers)
        assert len({first for first, _ in answers}) > 1, "four seeds said the same"

    @pytest.mark.parametrize("top", [0, 3])
    async def test_logprobs_fit_the_tokens(self, driver: EngineDriver, top: int) -> None:
        answer = await driver.answer(self.prompt(16, seed=70), replace(GREEDY, logprobs=top))
        assert len(answer.logprobs) == len(answer.token_ids)
        for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
            assert position.chosen.token_id == token_id
            assert position.chosen.logprob <= 0.0
            assert len(position.top) == top
            values = [candidate.logprob for candidate in position.top]
            assert values == sorted(values, reverse=True)
            assert len({candidate.token_id for candidate in position.top}) == top
            for candidate in position.top:
                if candidate.token_id == token_id:
                    assert candidate.logprob == pytest.approx(position.chosen.logprob)
                else:
                    assert candidate.logprob <= position.chosen.logprob + 1e-4, "greedy takes the likeliest"

    async def test_no_logprobs_unless_asked_for(self, driver: EngineDriver) -> None:
        answer = await driver.answer(self.prompt(16, seed=71), GREEDY)
        assert answer.logprobs == ()

    @pytest.mark.parametrize("emitted", [1, 7, 23])
    async def test_a_continuation_equals_the_undisturbed_run(self, driver: EngineDriver, emitted: int) -> None:
        prompt = self.prompt(18, seed=80)
        undisturbed = (await driver.answer(prompt, GREEDY)).token_ids
        continued = await driver.answer(prompt, GREEDY, emitted=undisturbed[:emitted])
        assert continued.deltas[0].offset == emitted
        assert continued.token_ids == undisturbed[emitted:]
        assert continued.finish_reason is FinishReason.LENGTH

    async def test_abort_ends_with_one_delta(self, driver: EngineDriver) -> None:
        long = replace(GREEDY, max_tokens=driver.limits.max_model_len_tokens - 16)
        request = EngineRequest("to-be-aborted", self.prompt(8, seed=90), long)
        answer = driver.submit_request(request)
        await driver.start_of(answer)
        aborted_at = driver.messages
        driver.engine.abort("to-be-aborted")
        await driver.end_of(answer)
        assert answer.finish_reason is FinishReason.ABORT
        assert answer.deltas[-1].offset + len(answer.deltas[-1].token_ids) == len(answer.token_ids)
        assert answer.seen_at_message[-1] - aborted_at <= self.abort_lag_messages
        driver.engine.abort("to-be-aborted")
        # The id is free again, and whatever the engine still had to say on its predecessor came before this.
        again = driver.submit_request(replace(request, sampling=GREEDY))
        await driver.end_of(again)
        assert again.finish_reason is FinishReason.LENGTH
        await driver.until(lambda: _is_idle(driver.engine.load()))

    async def test_abort_of_an_unknown_request_is_ignored(self, driver: EngineDriver) -> None:
        driver.engine.abort("never-seen")
        assert (await driver.answer(self.prompt(8, seed=91), GREEDY)).finish_reason is FinishReason.LENGTH

    async def test_what_can_never_be_served_is_refused(self, driver: EngineDriver) -> None:
        limit = driver.limits.max_model_len_tokens
        prompt = self.prompt(8, seed=100)
        beyond_any_vocabulary = 1 << 31
        with pytest.raises(RequestRefused):
            driver.submit(self.prompt(limit, seed=101), GREEDY)
        with pytest.raises(RequestRefused):
            driver.submit((), GREEDY)
        with pytest.raises(RequestRefused):
            driver.submit((*prompt, beyond_any_vocabulary), GREEDY)
        with pytest.raises(RequestRefused):
            driver.submit((*prompt, -1), GREEDY)
        with pytest.raises(RequestRefused):
            driver.submit(prompt, GREEDY, emitted=self.prompt(GREEDY.max_tokens, seed=102))

    async def test_an_id_in_use_is_refused(self, driver: EngineDriver) -> None:
        request = EngineRequest("one-of-a-kind", self.prompt(8, seed=110), GREEDY)
        answer = driver.submit_request(request)
        with pytest.raises(RequestRefused):
            driver.engine.submit(request)
        await driver.end_of(answer)
        assert len(answer.token_ids) == GREEDY.max_tokens

    async def test_the_context_length_ends_an_answer(self, driver: EngineDriver) -> None:
        limit = driver.limits.max_model_len_tokens
        answer = await driver.answer(self.prompt(limit - 5, seed=120), GREEDY)
        assert 1 <= len(answer.token_ids) <= 5
        assert answer.finish_reason is FinishReason.LENGTH

    async def test_32_at_once_are_answered_as_if_alone(self, driver: EngineDriver) -> None:
        prompts = [self.prompt(5 + seed, seed=seed) for seed in range(200, 232)]
        samplings = [replace(GREEDY, max_tokens=4 + seed % 13) for seed in range(32)]
        together = [driver.submit(prompt, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
        for answer in together:
            await driver.end_of(answer)
        for seed in range(0, 32, 5):
            alone = await driver.answer(prompts[seed], samplings[seed])
            assert alone.token_ids == together[seed].token_ids

    async def test_load_counters_return_to_zero(self, driver: EngineDriver) -> None:
        before = driver.engine.load()
        answers = [driver.submit(self.prompt(30, seed=seed), GREEDY) for seed in range(300, 306)]
        await driver.start_of(answers[0])
        await driver.until(lambda: driver.engine.load().running_requests > 0)
        for answer in answers:
            await driver.end_of(answer)
        await driver.until(lambda: _is_idle(driver.engine.load()))
        after = driver.engine.load()
        assert after.finished_requests_total - before.finished_requests_total == 6
        assert after.generated_tokens_total - before.generated_tokens_total == 6 * GREEDY.max_tokens
        assert after.prefilled_tokens_total > before.prefilled_tokens_total
        assert after.step_ms > 0

    async def test_the_second_identical_prompt_hits_the_prefix_cache(self, driver: EngineDriver) -> None:
        block = driver.limits.block_tokens
        prompt = self.prompt(3 * block + block // 2, seed=400)
        first = await driver.answer(prompt, GREEDY)
        second = await driver.answer(prompt, GREEDY)
        assert first.cached_tokens == 0
        assert second.cached_tokens == 3 * block
        assert second.token_ids == first.token_ids

    async def test_a_fully_cached_prompt_still_computes_its_last_token(self, driver: EngineDriver) -> None:
        block = driver.limits.block_tokens
        prompt = self.prompt(2 * block, seed=401)
        first = await driver.answer(prompt, GREEDY)
        second = await driver.answer(prompt, GREEDY)
        assert 0 < second.cached_tokens < 2 * block
        assert second.token_ids == first.token_ids

    async def test_kv_events_name_the_prompt_s_blocks(self, driver: EngineDriver) -> None:
        block = driver.limits.block_tokens
        prompt = self.prompt(4 * block + 1, seed=402)
        hashes = block_hashes(prompt, block)
        assert not driver.cached_hashes & set(hashes)
        answer = await driver.answer(prompt, GREEDY)
        await driver.until(lambda: driver.cached_hashes >= set(hashes))
        generated = block_hashes(prompt + answer.token_ids[:-1], block)
        await driver.until(lambda: driver.cached_hashes >= set(generated))


def _is_idle(load: LoadReport) -> bool:
    return (
        load.running_requests,
        load.queued_requests,
        load.queued_prefill_tokens,
        load.running_tokens,
        load.kv_blocks_used,
    ) == (0, 0, 0, 0, 0)
