"""The vLLM engine against the suite of all engines, and what is its own. One engine serves the whole module."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from controlplane.model.prefix_hash import block_hashes
from controlplane.model.request import EngineRequest, FinishReason, SamplingParams
from engine_worker.engines.interface import Engine
from engine_worker.engines.vllm.engine import VllmEngine
from engine_worker.engines.vllm.settings import VllmSettings
from mesh.errors import RequestRefused
from penstock.testing.engine import GREEDY, EngineConformance, EngineDriver
from tests.in_time import still
from tests.vllm.tiny_model import EOS_TOKEN_ID, VOCABULARY, find_ending_prompt, greedy_answer

pytestmark = pytest.mark.vllm

KV_BLOCKS = 128
MAX_BATCH = 32
MAX_QUEUED = 16
BLOCK_TOKENS = 32
STEP_TOKENS = 256
_BLOCK_BYTES = 2 * 2 * 2 * 32 * 4 * BLOCK_TOKENS
"""Layers, keys and values, heads, width of a head, bytes of a float32, tokens."""


class TestVllmEngine(EngineConformance):
    vocabulary = VOCABULARY
    eos_token_id = EOS_TOKEN_ID
    timeout_s = 60.0
    model: ClassVar[Path]
    ending: ClassVar[tuple[int, ...]]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def checkpoint(cls, tiny_llama: Path) -> None:
        cls.model = tiny_llama
        cls.ending = find_ending_prompt(tiny_llama)

    @classmethod
    async def create_engine(cls) -> Engine:
        settings = VllmSettings(
            model_path=str(cls.model),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_num_seqs=MAX_BATCH,
            max_queued_requests=MAX_QUEUED,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=(KV_BLOCKS + 1) * _BLOCK_BYTES,
        )
        return VllmEngine(settings)

    def ending_prompt(self) -> tuple[int, ...]:
        return self.ending

    async def test_limits_are_what_was_asked_for(self, driver: EngineDriver) -> None:
        limits = driver.limits
        assert (limits.block_tokens, limits.kv_blocks) == (BLOCK_TOKENS, KV_BLOCKS)
        assert (limits.max_batch_requests, limits.max_step_tokens) == (MAX_BATCH, STEP_TOKENS)
        assert limits.max_model_len_tokens == 1024

    async def test_greedy_answers_are_those_of_transformers(self, driver: EngineDriver) -> None:
        prompts = [self.prompt(30, seed=seed) for seed in range(1000, 1004)]
        expected = greedy_answer(self.model, prompts, 40)
        for prompt, tokens in zip(prompts, expected, strict=True):
            answer = await driver.answer(prompt, replace(GREEDY, max_tokens=40))
            assert answer.token_ids == tokens

    @pytest.mark.parametrize("requests", [8, MAX_BATCH])
    async def test_the_deltas_of_a_step_come_as_one_message(self, driver: EngineDriver, requests: int) -> None:
        sampling = replace(GREEDY, max_tokens=60)
        before = driver.messages
        answers = [driver.submit(self.prompt(6, seed=1100 + seed), sampling) for seed in range(requests)]
        for answer in answers:
            await driver.end_of(answer)
        messages = driver.messages - before
        # The first steps admit the requests in two or three groups.
        assert messages <= 60 + 4
        deltas = sum(len(answer.deltas) for answer in answers)
        print(f"{requests} requests: {deltas} deltas, {requests * 60} tokens in {messages} messages")
        assert deltas / messages > 0.8 * requests

    async def test_frequency_penalty_and_bias_survive_a_continuation(self, driver: EngineDriver) -> None:
        prompt = self.prompt(18, seed=1200)
        sampling = replace(GREEDY, max_tokens=60, frequency_penalty=1.5, logit_bias=((7, 3.0), (9, -2.0)))
        undisturbed = (await driver.answer(prompt, sampling)).token_ids
        assert undisturbed != (await driver.answer(prompt, replace(GREEDY, max_tokens=60))).token_ids
        for emitted in (1, 20, 50):
            continued = await driver.answer(prompt, sampling, emitted=undisturbed[:emitted])
            assert continued.token_ids == undisturbed[emitted:]

    async def test_min_tokens_counts_the_emitted_ones(self, driver: EngineDriver) -> None:
        sampling = replace(GREEDY, max_tokens=512, ignore_eos=False)
        ending = await driver.answer(self.ending, sampling)
        # Counted anew, they would hold the end off for three tokens too long.
        held = replace(sampling, min_tokens=len(ending.token_ids) - 1)
        continued = await driver.answer(self.ending, held, emitted=ending.token_ids[:3])
        assert continued.token_ids == ending.token_ids[3:]

    async def test_sampled_answers_need_no_seed(self, driver: EngineDriver) -> None:
        sampling = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, ignore_eos=True)
        answer = await driver.answer(self.prompt(10, seed=1300), sampling)
        assert len(answer.token_ids) == 20

    @pytest.mark.parametrize(
        "sampling",
        [
            replace(GREEDY, temperature=-1.0),
            replace(GREEDY, top_p=1.5),
            replace(GREEDY, logprobs=21),
            replace(GREEDY, repetition_penalty=0.0),
            replace(GREEDY, logit_bias=((1 << 20, 1.0),)),
            replace(GREEDY, min_tokens=GREEDY.max_tokens + 1),
        ],
    )
    async def test_parameters_out_of_range_are_refused(self, driver: EngineDriver, sampling: SamplingParams) -> None:
        with pytest.raises(RequestRefused):
            driver.submit(self.prompt(10, seed=1310), sampling)

    async def test_abort_right_after_submission(self, driver: EngineDriver) -> None:
        request = EngineRequest("short-lived", self.prompt(8, seed=1400), GREEDY)
        answer = driver.submit_request(request)
        driver.engine.abort("short-lived")
        await driver.end_of(answer)
        assert (answer.finish_reason, answer.token_ids) == (FinishReason.ABORT, ())
        again = driver.submit_request(request)
        await driver.end_of(again)
        assert again.finish_reason is FinishReason.LENGTH

    async def test_a_full_queue_refuses_and_priority_goes_first(self, driver: EngineDriver) -> None:
        sampling = replace(GREEDY, max_tokens=40)
        running = [
            driver.submit(self.prompt(8, seed=1500 + number), replace(sampling, max_tokens=20 + number))
            for number in range(MAX_BATCH)
        ]
        low = [
            driver.submit_request(
                EngineRequest(f"low-{number}", self.prompt(8, seed=1600 + number), sampling, priority=5)
            )
            for number in range(MAX_QUEUED - 1)
        ]
        high = driver.submit_request(EngineRequest("high", self.prompt(8, seed=1700), sampling, priority=1))
        with pytest.raises(RequestRefused, match="full"):
            driver.submit(self.prompt(8, seed=1701), sampling)
        for answer in (*running, *low, high):
            await driver.end_of(answer)
        assert high.seen_at_message[0] <= min(answer.seen_at_message[0] for answer in low)

    async def test_the_load_follows_a_chunked_prefill(self, driver: EngineDriver) -> None:
        decoding = driver.submit(self.prompt(8, seed=1800), replace(GREEDY, max_tokens=200))
        await driver.start_of(decoding)
        long = self.prompt(900, seed=1801)
        prefilled = driver.engine.load().prefilled_tokens_total
        prefilling = driver.submit(long, replace(GREEDY, max_tokens=4))
        seen = [driver.engine.load().queued_prefill_tokens]
        while not prefilling.started.is_set():
            seen.append(driver.engine.load().queued_prefill_tokens)
            messages = driver.messages
            await driver.until(lambda: driver.messages > messages)  # noqa: B023
        assert seen[0] == 900
        assert seen == sorted(seen, reverse=True)
        # A budget of STEP_TOKENS takes four steps; a busy machine may show two of them at once.
        still(len(set(seen)) >= 3, f"the steps of the prefill are seen one by one: {seen}")
        load = driver.engine.load()
        assert load.queued_prefill_tokens == 0
        assert load.prefilled_tokens_total - prefilled == 900
        still(load.running_requests == 2, f"both run: {load.running_requests}")
        assert load.running_tokens >= 900
        assert load.kv_blocks_used >= 900 // BLOCK_TOKENS
        await driver.end_of(prefilling)
        again = driver.submit(long, replace(GREEDY, max_tokens=4))
        assert driver.engine.load().queued_prefill_tokens == 900 % BLOCK_TOKENS, "the rest is cached"
        await driver.end_of(again)
        await driver.end_of(decoding)

    async def test_evicted_blocks_leave_the_index(self, driver: EngineDriver) -> None:
        first = self.prompt(4 * BLOCK_TOKENS, seed=1900)
        await driver.answer(first, GREEDY)
        await driver.until(lambda: set(block_hashes(first, BLOCK_TOKENS)) <= driver.cached_hashes)
        for seed in range(1901, 1906):
            await driver.answer(self.prompt(900, seed=seed), GREEDY)
        last = set(block_hashes(self.prompt(900, seed=1905), BLOCK_TOKENS))
        await driver.until(lambda: last <= driver.cached_hashes)
        assert not set(block_hashes(first, BLOCK_TOKENS)) & driver.cached_hashes
        assert len(driver.cached_hashes) <= KV_BLOCKS
        assert (await driver.answer(first, GREEDY)).cached_tokens == 0

    async def test_preempted_requests_are_answered_all_the_same(self, driver: EngineDriver) -> None:
        sampling = replace(GREEDY, max_tokens=380)
        preemptions = driver.engine.load().preemptions_total
        prompts = [self.prompt(32, seed=seed) for seed in range(2000, 2012)]
        answers = [driver.submit(prompt, sampling) for prompt in prompts]
        for answer in answers:
            await driver.end_of(answer)
        assert driver.engine.load().preemptions_total > preemptions
        for prompt, answer in zip(prompts[-3:], answers[-3:], strict=True):
            assert (await driver.answer(prompt, sampling)).token_ids == answer.token_ids
